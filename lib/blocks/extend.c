/* SPDX-License-Identifier: Apache-2.0 */
/* Adding tokens: prefix hits, copy-on-write and new blocks, in all groups or in none. */
#include "blocks/index.h"

kvleaf_status kvl_check_tokens(const kvleaf_tokens *tokens)
{
    kvleaf_status status = kvl_check_struct(tokens, tokens ? tokens->struct_size : 0, sizeof *tokens, "kvleaf_tokens");
    if (status)
        return status;
    if (tokens->count < 0)
        return kvl_fail_range("count", tokens->count, 0, INT64_MAX);
    if (tokens->num_spans < 0)
        return kvl_fail_range("num_spans", tokens->num_spans, 0, INT32_MAX);
    if (tokens->num_spans > 0 && !tokens->spans)
        return kvl_fail_null("spans");
    int64_t least = 0;
    for (int32_t i = 0; i < tokens->num_spans; i++) {
        const kvleaf_span *span = &tokens->spans[i];
        if (span->start < least || span->start >= tokens->count)
            return kvl_fail(KVLEAF_INVALID, "start", span->start, tokens->count - 1,
                            "spans[%d].start is %lld, must be %lld .. %lld", i, (long long)span->start,
                            (long long)least, (long long)tokens->count - 1);
        if (span->count < 1 || span->count > tokens->count - span->start)
            return kvl_fail(KVLEAF_INVALID, "count", span->count, tokens->count - span->start,
                            "spans[%d].count is %lld, must be 1 .. %lld", i, (long long)span->count,
                            (long long)(tokens->count - span->start));
        least = span->start + span->count;
    }
    return KVLEAF_OK;
}

/* What an extension by some tokens needs. */
typedef struct growth {
    kvl_match match;
    int64_t found; /* tokens of the match */
    int32_t count; /* entries of each table afterwards */
    int32_t slot;  /* where the first new token goes in the last block of now; 0 = it needs a new one */
    struct {
        bool copy;          /* that block has to be copied first */
        int32_t first_seen; /* entry of the table that the token behind the match sees */
        int32_t needed;     /* of the available blocks, those of the match included */
        int32_t source;     /* of the copy of a partial match */
    } groups[KVL_MAX_GROUPS];
} growth;

/* Whether a block that the match relies on is among the available ones. */
static int32_t is_available(const kvleaf_blocks *blocks, int32_t entry, int32_t group)
{
    int32_t block = kvl_index_block(blocks, entry, group);
    return blocks->groups[group].blocks[block].next != KVL_UNLISTED;
}

static int32_t needed_by_match(const kvleaf_blocks *blocks, const kvl_sequence *sequence, const growth *growth,
                               int32_t group)
{
    const kvl_match *match = &growth->match;
    int32_t needed = match->partial_tokens > 0 ? is_available(blocks, match->partial, group) : 0;
    int32_t first = growth->groups[group].first_seen, entry = match->last;
    for (int32_t at = sequence->count + match->blocks - 1; at >= sequence->count && at >= first; at--) {
        needed += is_available(blocks, entry, group);
        entry = blocks->index.entries[entry].parent;
    }
    return needed;
}

/* False where it is beyond max_blocks_per_seq. */
static bool plan_growth(const kvleaf_blocks *blocks, const kvl_sequence *sequence, int64_t tokens, growth *out)
{
    int64_t most = (int64_t)blocks->max_blocks_per_seq * blocks->block_size;
    if (tokens > most - sequence->extended)
        return false;
    out->found = (int64_t)out->match.blocks * blocks->block_size + out->match.partial_tokens;
    out->count = kvl_columns(blocks, sequence->extended + tokens);
    out->slot = kvl_slot(blocks, sequence->extended);
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        const int32_t *table = kvl_sequence_table(sequence, i);
        out->groups[i].copy = tokens > 0 && out->slot > 0 &&
                              kvl_group_must_copy(&blocks->groups[i], table[sequence->count - 1], out->slot);
        out->groups[i].first_seen = kvl_first_seen(blocks, i, sequence->extended + out->found);
        out->groups[i].needed = out->count - sequence->count - out->match.blocks + (out->groups[i].copy ? 1 : 0) +
                                needed_by_match(blocks, sequence, out, i);
    }
    return true;
}

/* A group without the blocks that are needed, or -1. */
static int32_t lacking_group(const kvleaf_blocks *blocks, const growth *growth)
{
    for (int32_t i = 0; i < blocks->num_groups; i++)
        if (growth->groups[i].needed > kvl_group_available(&blocks->groups[i]))
            return i;
    return -1;
}

static void set_entry(kvl_sequence *sequence, int32_t group, int32_t index, int32_t block)
{
    kvl_sequence_table(sequence, group)[index] = block;
    if (sequence->first_changed[group] > index)
        sequence->first_changed[group] = index;
}

/* Makes the last block fit for writing: a block of its own, which the index does not know. */
static void open_last_block(kvleaf_blocks *blocks, kvl_sequence *sequence, const growth *growth, int32_t group)
{
    int32_t last = sequence->count - 1, block = kvl_sequence_table(sequence, group)[last];
    if (!growth->groups[group].copy) {
        if (blocks->groups[group].blocks[block].entry != KVL_NO_ENTRY)
            kvl_index_leave(blocks, group, block);
        kvl_swap_unlink(&blocks->groups[group], block);
        return;
    }
    /* Only committed tokens are worth copying; whatever lies behind them is still to be computed. */
    int32_t slots = (int32_t)(sequence->committed - (int64_t)last * blocks->block_size);
    int32_t taken = kvl_group_copy_on_write(blocks, group, block, slots, &sequence->params);
    if (group == blocks->primary)
        kvl_tokens_copy(blocks, block, taken, growth->slot);
    set_entry(sequence, group, last, taken);
}

/* Refers to the blocks of the match that the next token sees; the others are as if they had left the window. */
static void refer_to_match(kvleaf_blocks *blocks, kvl_sequence *sequence, const growth *growth, int32_t group)
{
    int32_t entry = growth->match.last;
    for (int32_t at = sequence->count + growth->match.blocks - 1; at >= sequence->count; at--) {
        bool seen = at >= growth->groups[group].first_seen;
        int32_t block = seen ? kvl_index_block(blocks, entry, group) : KVLEAF_NO_BLOCK;
        if (seen)
            kvl_group_refer(blocks, group, block);
        set_entry(sequence, group, at, block);
        entry = blocks->index.entries[entry].parent;
    }
}

/* Takes hold of all that the match relies on, in all groups: a block that is taken afterwards may be evicted from the
 * same chain. */
static void hold_match(kvleaf_blocks *blocks, kvl_sequence *sequence, growth *growth)
{
    const kvl_match *match = &growth->match;
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        refer_to_match(blocks, sequence, growth, i);
        if (match->partial_tokens == 0)
            continue;
        growth->groups[i].source = kvl_index_block(blocks, match->partial, i);
        kvl_group_pin(blocks, i, growth->groups[i].source, match->partial_tokens);
    }
    kvl_index_lengthen(blocks, sequence, match->blocks, match->last);
}

static void take_blocks(kvleaf_blocks *blocks, kvl_sequence *sequence, const growth *growth, int32_t group)
{
    int32_t first = sequence->count + growth->match.blocks;
    for (int32_t i = first; i < growth->count; i++)
        set_entry(sequence, group, i, kvl_group_take(blocks, group));
    if (growth->match.partial_tokens > 0)
        kvl_group_fill(&blocks->groups[group], growth->groups[group].source,
                       kvl_sequence_table(sequence, group)[first]);
}

static void grow(kvleaf_blocks *blocks, kvl_sequence *sequence, const kvleaf_tokens *tokens, growth *growth)
{
    int64_t whole = (int64_t)growth->match.blocks * blocks->block_size;
    for (int32_t i = 0; growth->slot > 0 && tokens->count > 0 && i < blocks->num_groups; i++)
        open_last_block(blocks, sequence, growth, i);
    if (growth->found > 0)
        hold_match(blocks, sequence, growth);
    for (int32_t i = 0; i < blocks->num_groups; i++)
        take_blocks(blocks, sequence, growth, i);
    sequence->count = growth->count;
    kvl_tokens_write(blocks, sequence, sequence->extended + whole, tokens, whole);
    if (growth->found > 0) {
        sequence->committed = sequence->planned = sequence->extended + growth->found;
        sequence->known = sequence->committed;
        sequence->cached += growth->found;
    }
    sequence->extended += tokens->count;
    sequence->known = kvl_tokens_known(blocks, sequence);
    if (growth->found > 0)
        kvl_sequence_leave_windows(blocks, sequence);
    kvl_sequence_note_peak(blocks, sequence);
    blocks->tokens += tokens->count;
    blocks->looked_up += tokens->ids ? (uint64_t)tokens->count : 0;
    blocks->hits += (uint64_t)growth->found;
}

/* Whether a look into the index could find some of the tokens. */
static bool may_match(const kvleaf_blocks *blocks, const kvl_sequence *sequence, const kvleaf_tokens *tokens)
{
    return blocks->index.entries && tokens->ids && tokens->count > 1 && !sequence->params.no_prefix &&
           !sequence->outdated && sequence->committed == sequence->extended &&
           (int64_t)sequence->indexed * blocks->block_size == sequence->extended && kvl_index_holds(blocks, sequence);
}

kvleaf_status kvleaf_blocks_seq_extend(kvleaf_blocks *blocks, kvleaf_seq seq, const kvleaf_tokens *tokens,
                                       int64_t *cached)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find_idle(blocks, seq, &sequence);
    if (!status)
        status = kvl_check_tokens(tokens);
    if (status)
        return status;
    growth growth = {.match = {.partial = KVL_NO_ENTRY}};
    if (may_match(blocks, sequence, tokens))
        growth.match =
            kvl_match_find(blocks, sequence->params.salt, sequence->count, sequence->tip, sequence->first_held, tokens);
    if (!plan_growth(blocks, sequence, tokens->count, &growth)) {
        int64_t most = (int64_t)blocks->max_blocks_per_seq * blocks->block_size;
        return kvl_fail(KVLEAF_TOO_SMALL, "count", tokens->count, most - sequence->extended,
                        "%lld more tokens behind %lld, a sequence may have %lld", (long long)tokens->count,
                        (long long)sequence->extended, (long long)most);
    }
    if (growth.match.partial_tokens > 0 && lacking_group(blocks, &growth) >= 0) {
        growth.match.partial_tokens = 0; /* its source would have to stay */
        plan_growth(blocks, sequence, tokens->count, &growth);
    }
    int32_t lacking = lacking_group(blocks, &growth);
    if (lacking >= 0) {
        int32_t needed = growth.groups[lacking].needed, there = kvl_group_available(&blocks->groups[lacking]);
        return kvl_fail(KVLEAF_NO_BLOCKS, "count", needed, there,
                        "%lld more tokens need %d blocks of group %d, %d are available", (long long)tokens->count,
                        needed, lacking, there);
    }
    status = kvl_sequence_reserve(blocks, sequence, growth.count);
    if (status)
        return status;
    grow(blocks, sequence, tokens, &growth);
    if (cached)
        *cached = growth.found;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_can_extend(const kvleaf_blocks *blocks, kvleaf_seq seq, int64_t count, bool *out)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, seq, &sequence);
    if (!status)
        status = kvl_sequence_check_resident(sequence, seq);
    if (status)
        return status;
    if (!out)
        return kvl_fail_null("out");
    if (count < 0)
        return kvl_fail_range("count", count, 0, INT64_MAX);
    growth growth = {.match = {.partial = KVL_NO_ENTRY}};
    *out = plan_growth(blocks, sequence, count, &growth) && lacking_group(blocks, &growth) < 0;
    return KVLEAF_OK;
}
