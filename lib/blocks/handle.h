/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_BLOCKS_HANDLE_H
#define KVL_BLOCKS_HANDLE_H

/* A kvleaf_seq: from the top, 20 bits that are the manager's own (never 0, so no handle is 0), 24 bits of generation,
 * 20 bits of slot. */

#include <stdint.h>

#define KVL_SLOT_BITS       20
#define KVL_GENERATION_BITS 24
#define KVL_MAX_SEQUENCES   (1 << KVL_SLOT_BITS)

static inline uint64_t kvl_handle(uint64_t tag, uint32_t generation, int32_t slot)
{
    return tag << (KVL_SLOT_BITS + KVL_GENERATION_BITS) | (uint64_t)generation << KVL_SLOT_BITS | (uint64_t)slot;
}

/* A manager's tag out of 64 well-mixed bits. */
static inline uint64_t kvl_handle_tag(uint64_t bits)
{
    uint64_t tag = bits >> (KVL_SLOT_BITS + KVL_GENERATION_BITS);
    return tag ? tag : 1;
}

static inline uint64_t kvl_handle_tag_of(uint64_t handle)
{
    return handle >> (KVL_SLOT_BITS + KVL_GENERATION_BITS);
}

static inline uint32_t kvl_handle_generation_of(uint64_t handle)
{
    return (uint32_t)(handle >> KVL_SLOT_BITS) & ((1u << KVL_GENERATION_BITS) - 1);
}

static inline int32_t kvl_handle_slot_of(uint64_t handle)
{
    return (int32_t)(handle & (KVL_MAX_SEQUENCES - 1));
}

static inline uint32_t kvl_handle_next(uint32_t generation)
{
    return (generation + 1) & ((1u << KVL_GENERATION_BITS) - 1);
}

#endif
