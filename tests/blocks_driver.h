/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BLOCKS_DRIVER_H
#define BLOCKS_DRIVER_H

/* Operations on a block manager and on the model of it, chosen at random or by a fuzzer's bytes, right ones and wrong
 * ones. After each of them everything that can be asked, and the manager's inside, is compared. A difference prints the
 * operations that led to it and aborts. */

#include <stddef.h>

#include "blocks_model.h"

/* How often each status was answered, by -status, and what else shows that a run was not tame. */
typedef struct driver_tally {
    int64_t statuses[16];
    int64_t operations, copies, hits, partial_hits, evictions, swaps, swapped_blocks;
} driver_tally;

typedef struct driver_params {
    int32_t block_size, num_groups;
    int32_t windows[MODEL_GROUPS];
    int32_t swap_blocks; /* of each group */
    bool no_prefix_cache;
    bool policy;                /* an eviction policy of the driver's own */
    bool one_hash;              /* all hashes are one: what is found must not depend on them */
    int32_t max_blocks_per_seq; /* 0 = all */
    int32_t failing;            /* one allocation in so many fails; 0 = none */
    int32_t stray;              /* one id in so many is not its prompt's; 0 = 200 */
} driver_params;

typedef struct driver driver;

/* `bytes` NULL: choices follow from `seed`. */
driver *driver_create(const driver_params *params, uint64_t seed, const uint8_t *bytes, size_t size);
/* Does one operation; false when the bytes are used up. */
bool driver_operate(driver *d);
/* The manager that is driven. */
const kvleaf_blocks *driver_blocks(const driver *d);
/* Closes all steps, destroys all sequences, checks that nothing is left, and frees everything. */
void driver_destroy(driver *d, driver_tally *tally);

#endif
