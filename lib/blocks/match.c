/* SPDX-License-Identifier: Apache-2.0 */
/* What of some tokens the prefix index holds. */
#include "blocks/index.h"

bool kvl_index_is_there(const kvleaf_blocks *blocks, int32_t entry, int32_t group)
{
    int32_t block = kvl_index_block(blocks, entry, group);
    return block != KVLEAF_NO_BLOCK && !kvl_group_expired(blocks, group, block);
}

/* Whether a sequence could go on at block `depth`: in each group, the blocks from[group] .. depth-1 are there. */
static bool sees_all(const kvleaf_blocks *blocks, int32_t depth, const int32_t *from)
{
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        int32_t first = kvl_first_seen(blocks, i, (int64_t)depth * blocks->block_size);
        if (first < depth && first < from[i])
            return false;
    }
    return true;
}

static int32_t common_tokens(const kvleaf_blocks *blocks, int32_t entry, const int32_t *ids, int32_t most)
{
    const int32_t *there = kvl_block_ids(blocks, entry);
    int32_t count = 0;
    while (count < most && there[count] == ids[count])
        count++;
    return count;
}

/* The longest match inside the block behind match->last; the latest of the longest. */
static void find_partial(const kvleaf_blocks *blocks, uint64_t salt, const kvleaf_tokens *tokens, kvl_match *match)
{
    const kvl_entry *entries = blocks->index.entries;
    int64_t from = (int64_t)match->blocks * blocks->block_size, until = kvl_span_start(tokens, from);
    until = until < tokens->count - 1 ? until : tokens->count - 1;
    int32_t most = until - from < blocks->block_size ? (int32_t)(until - from) : blocks->block_size, looked_at = 0;
    for (int32_t at = kvl_index_first(blocks, match->last, salt);
         at != KVL_NO_ENTRY && looked_at < KVL_PARTIAL_CHILDREN && match->partial_tokens < most;
         at = entries[at].next_sibling) {
        if (entries[at].salt != salt)
            continue;
        looked_at++;
        const uint64_t *digest = blocks->contents[at].digest;
        bool usable = digest[0] == 0 && digest[1] == 0;
        for (int32_t i = 0; usable && i < blocks->num_groups; i++)
            usable = kvl_index_is_there(blocks, at, i);
        int32_t common = usable ? common_tokens(blocks, at, tokens->ids + from, most) : 0;
        if (common > match->partial_tokens) {
            match->partial = at;
            match->partial_tokens = common;
        }
    }
}

kvl_match kvl_match_find(const kvleaf_blocks *blocks, uint64_t salt, int32_t depth, int32_t parent,
                         const int32_t *first_held, const kvleaf_tokens *tokens)
{
    kvl_match match = {.last = parent, .partial = KVL_NO_ENTRY};
    int32_t from[KVL_MAX_GROUPS] = {0}, entry = parent;
    int64_t most = (tokens->count - 1) / blocks->block_size;
    for (int32_t i = 0; first_held && i < blocks->num_groups; i++)
        from[i] = first_held[i];
    for (int32_t i = 0; i < most; i++) {
        int64_t token = (int64_t)i * blocks->block_size;
        kvl_content content = {.end = 0};
        if (tokens->num_spans > 0)
            kvl_content_add(&content, tokens, token, blocks->block_size, 0);
        const kvl_key key = {
            .parent = entry,
            .salt = salt,
            .content = &content,
            .ids = tokens->ids + token,
        };
        entry = kvl_index_find(blocks, &key);
        if (entry == KVL_NO_ENTRY || !kvl_index_is_there(blocks, entry, blocks->primary))
            break;
        for (int32_t group = 0; group < blocks->num_groups; group++)
            if (group != blocks->primary && !kvl_index_is_there(blocks, entry, group))
                from[group] = depth + i + 1;
        if (sees_all(blocks, depth + i + 1, from)) {
            match.blocks = i + 1;
            match.last = entry;
        }
    }
    find_partial(blocks, salt, tokens, &match);
    return match;
}

kvleaf_status kvleaf_blocks_prefix_match(const kvleaf_blocks *blocks, const kvleaf_seq_params *params,
                                         const kvleaf_tokens *tokens, int64_t *matched)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    kvleaf_status status = kvl_check_seq_params(params);
    if (!status)
        status = kvl_check_tokens(tokens);
    if (status)
        return status;
    if (tokens->count > 0 && !tokens->ids)
        return kvl_fail_null("ids");
    if (!matched)
        return kvl_fail_null("matched");
    *matched = 0;
    if (!blocks->index.entries || tokens->count == 0 || (params && params->no_prefix))
        return KVLEAF_OK;
    kvl_match match = kvl_match_find(blocks, params ? params->salt : 0, 0, KVL_NO_ENTRY, NULL, tokens);
    *matched = (int64_t)match.blocks * blocks->block_size + match.partial_tokens;
    return KVLEAF_OK;
}
