/* SPDX-License-Identifier: Apache-2.0 */
/* What the tokens of a sequence are: their ids, and what spans say of them. */
#include "blocks/index.h"

#include <string.h>
#include <xxhash.h>

#define CUT ((uint64_t)1 << 32)

/* One word more on a slot, or on a cut there. */
static void content_say(kvl_content *content, uint64_t slot, const uint64_t key[2])
{
    const uint64_t said[] = {content->digest[0], content->digest[1], slot, key[0], key[1]};
    XXH128_hash_t made = XXH3_128bits(said, sizeof said);
    content->digest[0] = made.low64;
    content->digest[1] = made.high64;
}

/* The first span that does not end before `token`. */
static int32_t first_span(const kvleaf_tokens *tokens, int64_t token)
{
    int32_t low = 0, high = tokens->num_spans;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (tokens->spans[middle].start + tokens->spans[middle].count <= token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int64_t kvl_span_start(const kvleaf_tokens *tokens, int64_t token)
{
    int32_t at = first_span(tokens, token);
    return at < tokens->num_spans ? tokens->spans[at].start : INT64_MAX;
}

/* Slot by slot, so that it does not matter in how many pieces a span was given. */
void kvl_content_add(kvl_content *content, const kvleaf_tokens *tokens, int64_t from, int32_t count, int32_t slot)
{
    for (int32_t i = first_span(tokens, from); i < tokens->num_spans; i++) {
        const kvleaf_span *span = &tokens->spans[i];
        int64_t first = span->start > from ? span->start : from, end = span->start + span->count;
        end = end < from + count ? end : from + count;
        if (first >= end)
            return;
        for (int64_t token = first; token < end; token++)
            content_say(content, (uint64_t)(slot + token - from), span->key);
        content->end = (int32_t)(slot + end - from);
    }
}

/* The block's content before tokens are written from `slot` on. What it says of slots that are written anew is part of
 * its past: blocks that only look alike must not have one digest. */
static void content_begin(kvl_content *content, int32_t slot)
{
    const uint64_t none[2] = {0, 0};
    if (slot == 0)
        *content = (kvl_content){.end = 0};
    if (content->end <= slot)
        return;
    content_say(content, CUT | (uint64_t)slot, none);
    content->end = slot;
}

void kvl_tokens_write(kvleaf_blocks *blocks, const kvl_sequence *sequence, int64_t position,
                      const kvleaf_tokens *tokens, int64_t from)
{
    const int32_t *table = kvl_sequence_table(sequence, blocks->primary);
    while (from < tokens->count) {
        int32_t block = table[kvl_column(blocks, position)], slot = kvl_slot(blocks, position);
        int32_t *ids = kvl_block_ids(blocks, block) + slot;
        int64_t left = tokens->count - from;
        int32_t count = left < blocks->block_size - slot ? (int32_t)left : blocks->block_size - slot;
        if (tokens->ids) {
            memcpy(ids, tokens->ids + from, (size_t)count * sizeof *ids);
        } else {
            for (int32_t i = 0; i < count; i++)
                ids[i] = KVL_UNKNOWN;
        }
        content_begin(&blocks->contents[block], slot);
        if (tokens->num_spans > 0)
            kvl_content_add(&blocks->contents[block], tokens, from, count, slot);
        position += count;
        from += count;
    }
}

void kvl_tokens_copy(kvleaf_blocks *blocks, int32_t from, int32_t to, int32_t slots)
{
    memcpy(kvl_block_ids(blocks, to), kvl_block_ids(blocks, from), (size_t)slots * sizeof *blocks->ids);
    blocks->contents[to] = blocks->contents[from];
}

/* Leading ids that are known. Most often all are, which is found without a branch on each. */
static int32_t leading_known(const int32_t *ids, int32_t count)
{
    int32_t unknown = 0, known = 0;
    for (int32_t i = 0; i < count; i++)
        unknown += ids[i] == KVL_UNKNOWN;
    if (unknown == 0)
        return count;
    while (ids[known] != KVL_UNKNOWN)
        known++;
    return known;
}

int64_t kvl_tokens_known(const kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    const int32_t *table = kvl_sequence_table(sequence, blocks->primary);
    int64_t known = sequence->known;
    while (known < sequence->extended && sequence->residence == KVL_RESIDENT) {
        int32_t block = table[kvl_column(blocks, known)], slot = kvl_slot(blocks, known);
        int64_t left = sequence->extended - known;
        int32_t count = left < blocks->block_size - slot ? (int32_t)left : blocks->block_size - slot;
        if (block == KVLEAF_NO_BLOCK)
            return known;
        int32_t more = leading_known(kvl_block_ids(blocks, block) + slot, count);
        known += more;
        if (more < count)
            return known;
    }
    return known;
}

static kvleaf_status check_range(int64_t start, const int32_t *ids, int64_t count, int64_t end)
{
    if (start < 0 || start > end)
        return kvl_fail_range("start", start, 0, end);
    if (count < 0 || count > end - start)
        return kvl_fail_range("count", count, 0, end - start);
    return count > 0 && !ids ? kvl_fail_null("ids") : KVLEAF_OK;
}

/* Where the id of a token is, or NULL where it went with its block. */
static int32_t *id_of(const kvleaf_blocks *blocks, const kvl_sequence *sequence, int64_t token)
{
    int32_t block = kvl_sequence_table(sequence, blocks->primary)[kvl_column(blocks, token)];
    return block == KVLEAF_NO_BLOCK ? NULL : kvl_block_ids(blocks, block) + kvl_slot(blocks, token);
}

static kvleaf_status fail_gone(int64_t token)
{
    return kvl_fail(KVLEAF_INVALID, "start", token, 0,
                    "the id of token %lld went with its block, which left the window", (long long)token);
}

kvleaf_status kvleaf_blocks_seq_set_ids(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t start, const int32_t *ids,
                                        int64_t count)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find_idle(blocks, seq, &sequence);
    if (!status)
        status = check_range(start, ids, count, sequence->extended);
    if (status)
        return status;
    for (int64_t i = 0; i < count; i++) {
        const int32_t *at = id_of(blocks, sequence, start + i);
        if (!at)
            return fail_gone(start + i);
        if (start + i < sequence->committed && *at != KVL_UNKNOWN && *at != ids[i])
            return kvl_fail(KVLEAF_INVALID, "ids", ids[i], *at, "token %lld is committed and has the id %d, not %d",
                            (long long)start + (long long)i, *at, ids[i]);
    }
    for (int64_t i = 0; i < count; i++)
        *id_of(blocks, sequence, start + i) = ids[i];
    if (count > 0 && start < sequence->known)
        sequence->known = start;
    sequence->known = kvl_tokens_known(blocks, sequence);
    kvl_index_follow(blocks, sequence);
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_seq_ids(const kvleaf_blocks *blocks, kvleaf_seq seq, int64_t start, int32_t *ids,
                                    int64_t count)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, seq, &sequence);
    if (!status)
        status = kvl_sequence_check_resident(sequence, seq);
    if (!status)
        status = check_range(start, ids, count, kvl_tokens_known(blocks, sequence));
    if (status)
        return status;
    for (int64_t i = 0; i < count; i++)
        if (!id_of(blocks, sequence, start + i))
            return fail_gone(start + i);
    for (int64_t i = 0; i < count; i++)
        ids[i] = *id_of(blocks, sequence, start + i);
    return KVLEAF_OK;
}
