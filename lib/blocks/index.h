/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_BLOCKS_INDEX_H
#define KVL_BLOCKS_INDEX_H

/* The prefix index: chains of full committed blocks, found by what they hold.
 *
 * An entry is named by its block in the primary group; it knows the blocks of the other groups that hold the same
 * tokens, as far as they are there. Ids and contents lie with the block and do not change while it is in the index. The
 * hash of a chain (XXH3-128 of the parent's hash, or of the salt where a chain begins, of contents and ids) only finds
 * the bucket: a hit compares parent, salt, contents and ids, so that a collision can but miss. The parent of an entry
 * is always in the index: where one leaves, all behind it leave before it. */

#include "blocks/blocks.h"

enum { KVL_PARTIAL_CHILDREN = 8 };

struct kvl_entry {
    int32_t parent; /* KVL_NO_ENTRY at a prompt's first block */
    int32_t next_in_bucket;
    uint64_t salt;
    int32_t first_child, next_sibling, previous_sibling; /* latest first */
    int32_t children, depth;
    uint64_t serial; /* of its entering, ascending; 0 = not in the index */
    uint64_t hash[2];
};

/* What a block would be found by. */
typedef struct kvl_key {
    int32_t parent;
    uint64_t salt;
    const kvl_content *content;
    const int32_t *ids; /* [block_size] */
} kvl_key;

kvleaf_status kvl_index_create(kvleaf_blocks *blocks);
void kvl_index_destroy(kvleaf_blocks *blocks);

/* The entry that is found by a key, or KVL_NO_ENTRY. */
int32_t kvl_index_find(const kvleaf_blocks *blocks, const kvl_key *key);

/* Enters a block of the primary group, whose ids and content are in place, under a key that finds nothing. */
void kvl_index_enter(kvleaf_blocks *blocks, int32_t block, const kvl_key *key);

/* Makes a block of another group known to an entry that has none there. */
void kvl_index_attach(kvleaf_blocks *blocks, int32_t entry, int32_t group, int32_t block);

/* Takes what finds a block out of the index: of the primary group its entry, all behind it first; of another group the
 * block alone. What is cached becomes free. */
void kvl_index_leave(kvleaf_blocks *blocks, int32_t group, int32_t block);

/* The block of an entry in a group, or KVLEAF_NO_BLOCK. */
int32_t kvl_index_block(const kvleaf_blocks *blocks, int32_t entry, int32_t group);

/* Whether a group still has its block of an entry, and its time is not over. */
bool kvl_index_is_there(const kvleaf_blocks *blocks, int32_t entry, int32_t group);

/* The first child, the latest, of an entry, or the first root of a salt. Roots of other salts stand between. */
int32_t kvl_index_first(const kvleaf_blocks *blocks, int32_t parent, uint64_t salt);

/* The entry after `entry` in an order that has parents before children; the first one after KVL_NO_ENTRY; KVL_NO_ENTRY
 * after the last. */
int32_t kvl_index_next(const kvleaf_blocks *blocks, int32_t entry);

/* Follows the chain of a sequence as far as its tokens are committed and known, and enters what is not there. */
void kvl_index_follow(kvleaf_blocks *blocks, kvl_sequence *sequence);

/* Whether the leading `sequence->indexed` blocks are in the index still. */
bool kvl_index_holds(const kvleaf_blocks *blocks, const kvl_sequence *sequence);

/* Adds `count` blocks to the sequence's chain, which ends with the entry `tip` then. */
void kvl_index_lengthen(const kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t count, int32_t tip);

/* Lets the sequence's chain end after `count` blocks, at most where it ends now. */
void kvl_index_shorten(const kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t count);

/* tokens.c: adds what the spans of tokens from .. from + count - 1 say to the content of the block whose slots they
 * take from `slot` on. */
void kvl_content_add(kvl_content *content, const kvleaf_tokens *tokens, int64_t from, int32_t count, int32_t slot);

/* Where the first span begins that does not end before `token`; INT64_MAX where there is none. */
int64_t kvl_span_start(const kvleaf_tokens *tokens, int64_t token);

/* Notes the ids and contents of tokens `from` on, whose places in the sequence begin at `position`. */
void kvl_tokens_write(kvleaf_blocks *blocks, const kvl_sequence *sequence, int64_t position,
                      const kvleaf_tokens *tokens, int64_t from);

/* Copies what is noted of a block's first slots to another block. */
void kvl_tokens_copy(kvleaf_blocks *blocks, int32_t from, int32_t to, int32_t slots);

/* The sequence's leading tokens whose ids are known, at least sequence->known: other sequences that share its blocks
 * may have been told more. */
int64_t kvl_tokens_known(const kvleaf_blocks *blocks, const kvl_sequence *sequence);

/* Checks of arguments; `params` may be NULL. */
kvleaf_status kvl_check_seq_params(const kvleaf_seq_params *params);
kvleaf_status kvl_check_tokens(const kvleaf_tokens *tokens);

/* match.c: what of some tokens the index holds. */
typedef struct kvl_match {
    int32_t blocks; /* whole ones, from the first token on */
    int32_t last;   /* the entry of the last block before the rest, those of the sequence included */
    int32_t partial;
    int32_t partial_tokens; /* that the entry `partial` begins with, too; 0 = none */
} kvl_match;

/* Looks behind `depth` blocks of a sequence that end with the entry `parent`; first_held as the sequence's, NULL = all
 * 0. At least one token is left. */
kvl_match kvl_match_find(const kvleaf_blocks *blocks, uint64_t salt, int32_t depth, int32_t parent,
                         const int32_t *first_held, const kvleaf_tokens *tokens);

#endif
