/* SPDX-License-Identifier: Apache-2.0 */
/* Steps: which tokens are computed, and what became of them. No call here allocates. */
#include "blocks/index.h"

static kvleaf_status check_list(const kvleaf_blocks *blocks, const void *seqs, int32_t n)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    if (n < 0)
        return kvl_fail_range("n", n, 0, INT32_MAX);
    if (n > 0 && !seqs)
        return kvl_fail_null("seqs");
    return KVLEAF_OK;
}

kvleaf_status kvl_sequence_find_once(const kvleaf_blocks *blocks, const kvleaf_seq *seqs, int32_t at,
                                     kvl_sequence **out)
{
    kvleaf_status status = kvl_sequence_find(blocks, seqs[at], out);
    if (status)
        return status;
    if ((*out)->mark == blocks->mark)
        return kvl_fail(KVLEAF_INVALID, "seqs", at, 1, "seqs[%d] stands before it in the list", at);
    (*out)->mark = blocks->mark;
    return KVLEAF_OK;
}

static kvleaf_status check_open(const kvl_sequence *sequence, int32_t at)
{
    if (sequence->planned > sequence->committed)
        return KVLEAF_OK;
    return kvl_fail(KVLEAF_INVALID, "seqs", at, 0, "seqs[%d] is in no open step", at);
}

kvleaf_status kvleaf_blocks_step_begin(kvleaf_blocks *blocks, const kvleaf_seq *seqs, const int32_t *num_q, int32_t n)
{
    kvleaf_status status = check_list(blocks, seqs, n);
    if (status)
        return status;
    if (n > 0 && !num_q)
        return kvl_fail_null("num_q");
    blocks->mark++;
    kvl_sequence *sequence = NULL;
    for (int32_t i = 0; i < n; i++) {
        status = kvl_sequence_find_once(blocks, seqs, i, &sequence);
        if (status)
            return status;
        if (sequence->planned > sequence->committed || sequence->residence != KVL_RESIDENT)
            return kvl_fail(KVLEAF_BUSY, "seqs", i, 0, "seqs[%d] is %s", i,
                            sequence->residence == KVL_RESIDENT ? "in another open step" : "swapped out");
        int64_t most = sequence->extended - sequence->committed;
        if (num_q[i] < 1 || num_q[i] > most)
            return kvl_fail(KVLEAF_INVALID, "num_q", num_q[i], most,
                            "num_q[%d] is %d, must be 1 .. %lld, the tokens extended and not computed", i, num_q[i],
                            (long long)most);
    }
    for (int32_t i = 0; i < n; i++)
        if (kvl_sequence_find(blocks, seqs[i], &sequence) == KVLEAF_OK)
            sequence->planned = sequence->committed + num_q[i];
    return KVLEAF_OK;
}

/* Whether a block where the sequence's planned tokens begin still waits for the committed ones before them. */
static bool copy_pending(const kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    int32_t at = kvl_column(blocks, sequence->committed);
    for (int32_t i = 0; i < blocks->num_groups; i++)
        if (blocks->groups[i].blocks[kvl_sequence_table(sequence, i)[at]].copy != KVL_NO_COPY)
            return true; /* no window has left behind what comes next */
    return false;
}

static kvleaf_status check_commit(kvleaf_blocks *blocks, const kvleaf_seq *seqs, const int32_t *accepted, int32_t n)
{
    blocks->mark++;
    for (int32_t i = 0; i < n; i++) {
        kvl_sequence *sequence = NULL;
        kvleaf_status status = kvl_sequence_find_once(blocks, seqs, i, &sequence);
        if (!status)
            status = check_open(sequence, i);
        if (status)
            return status;
        int64_t most = sequence->planned - sequence->committed;
        int64_t taken = accepted ? accepted[i] : most;
        if (taken < 0 || taken > most)
            return kvl_fail(KVLEAF_INVALID, "accepted", taken, most, "accepted[%d] is %lld, must be 0 .. %lld", i,
                            (long long)taken, (long long)most);
        if (taken > 0 && copy_pending(blocks, sequence))
            return kvl_fail(KVLEAF_INVALID, "seqs", i, 0,
                            "the copy that the tokens of seqs[%d] rely on is still pending", i);
    }
    return KVLEAF_OK;
}

/* Makes the first of the planned tokens count. */
static kvleaf_status commit(kvleaf_blocks *blocks, kvl_sequence *sequence, int64_t reached)
{
    kvleaf_status status = KVLEAF_OK;
    int64_t before = sequence->committed, planned = sequence->planned;
    for (int32_t i = 0; reached > before && i < blocks->num_groups; i++)
        for (int32_t at = kvl_column(blocks, before); at < kvl_columns(blocks, reached); at++)
            kvl_swap_unlink(&blocks->groups[i], kvl_sequence_table(sequence, i)[at]);
    sequence->committed = sequence->planned = reached;
    if (reached < planned)
        status = kvl_sequence_cut(blocks, sequence, reached);
    sequence->known = kvl_tokens_known(blocks, sequence);
    kvl_index_follow(blocks, sequence);
    kvl_sequence_leave_windows(blocks, sequence);
    return status;
}

kvleaf_status kvleaf_blocks_step_commit(kvleaf_blocks *blocks, const kvleaf_seq *seqs, const int32_t *accepted,
                                        int32_t n)
{
    kvleaf_status status = check_list(blocks, seqs, n);
    if (!status)
        status = check_commit(blocks, seqs, accepted, n);
    for (int32_t i = 0; !status && i < n; i++) {
        kvl_sequence *sequence = NULL;
        status = kvl_sequence_find(blocks, seqs[i], &sequence);
        if (status)
            return status;
        status = commit(blocks, sequence, accepted ? sequence->committed + accepted[i] : sequence->planned);
    }
    return status;
}

kvleaf_status kvleaf_blocks_step_rollback(kvleaf_blocks *blocks, const kvleaf_seq *seqs, int32_t n)
{
    kvleaf_status status = check_list(blocks, seqs, n);
    if (status)
        return status;
    blocks->mark++;
    kvl_sequence *sequence = NULL;
    for (int32_t i = 0; i < n; i++) {
        status = kvl_sequence_find_once(blocks, seqs, i, &sequence);
        if (!status)
            status = check_open(sequence, i);
        if (status)
            return status;
    }
    for (int32_t i = 0; i < n; i++)
        if (kvl_sequence_find(blocks, seqs[i], &sequence) == KVLEAF_OK)
            sequence->planned = sequence->committed;
    return KVLEAF_OK;
}
