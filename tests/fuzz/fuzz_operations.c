/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: the bytes choose a block manager and operations on it, and the slow model of it must agree after each. */
#include "blocks_driver.h"

enum { MOST_BYTES = 768 }; /* a few hundred operations: many short runs find more than few long ones */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const driver_params managers[] = {
        {.block_size = 4, .num_groups = 1, .swap_blocks = 20},
        {.block_size = 3, .num_groups = 2, .windows = {0, 5}, .swap_blocks = 12},
        {.block_size = 2, .num_groups = 2, .windows = {3, 8}, .policy = true},
        {.block_size = 1, .num_groups = 1, .max_blocks_per_seq = 9, .one_hash = true},
    };
    if (size == 0)
        return 0;
    driver *d = driver_create(&managers[data[0] % (sizeof managers / sizeof *managers)], 1, data + 1,
                              size < MOST_BYTES ? size - 1 : MOST_BYTES - 1);
    while (driver_operate(d))
        ;
    driver_destroy(d, NULL);
    return 0;
}
