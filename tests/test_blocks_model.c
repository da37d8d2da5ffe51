/* SPDX-License-Identifier: Apache-2.0 */
/* The block manager beside a slow plain model of it: random operations, right and wrong ones, some with host memory
 * running out, compared after each (xllm #828). */
#include "blocks_driver.h"
#include "blocks_support.h"

#include <stdio.h>

static uint64_t base_seed = 20240917;

/* AddressSanitizer makes this five times as slow, and the fuzzer runs the same operations under it. */
#ifdef __SANITIZE_ADDRESS__
enum { FEWER = 3 };
#else
enum { FEWER = 1 };
#endif

static void run(const driver_params *params, int32_t managers, int32_t operations, driver_tally *tally)
{
    for (int32_t i = 0; i < managers; i += FEWER) {
        driver *d = driver_create(params, base_seed + (uint64_t)i, NULL, 0);
        for (int32_t j = 0; j < operations; j++) {
            assert_true(driver_operate(d));
            check_blocks(driver_blocks(d), 0);
        }
        driver_destroy(d, tally);
    }
    printf("%lld operations: %lld right, %lld without blocks, %lld without memory, %lld busy, %lld copies, "
           "%lld hits, %lld of them partial, %lld evictions\n",
           (long long)tally->operations, (long long)tally->statuses[-KVLEAF_OK],
           (long long)tally->statuses[-KVLEAF_NO_BLOCKS], (long long)tally->statuses[-KVLEAF_NO_MEMORY],
           (long long)tally->statuses[-KVLEAF_BUSY], (long long)tally->copies, (long long)tally->hits,
           (long long)tally->partial_hits, (long long)tally->evictions);
}

/* Whether a run met what is rare. */
static void assert_met(const driver_tally *tally)
{
    static const kvleaf_status statuses[] = {KVLEAF_INVALID, KVLEAF_NO_BLOCKS, KVLEAF_TOO_SMALL,
                                             KVLEAF_BUSY,    KVLEAF_STALE,     KVLEAF_FOREIGN};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        assert_true(tally->statuses[-statuses[i]] > tally->operations / 2500);
    assert_true(tally->statuses[-KVLEAF_OK] > tally->operations / 2);
    assert_true(tally->copies > tally->operations / 300);
}

static void test_one_group(void **state)
{
    static const int32_t sizes[] = {1, 2, 3, 4, 7};
    driver_tally tally = {0};
    (void)state;
    for (int32_t i = 0; i < 5; i++)
        run(&(driver_params){.block_size = sizes[i], .num_groups = 1}, 3, 2000, &tally);
    assert_met(&tally);
}

/* Prompts that part at every block: blocks with many that continue them. */
static void test_many_branches(void **state)
{
    driver_tally tally = {0};
    (void)state;
    run(&(driver_params){.block_size = 3, .num_groups = 1, .stray = 3}, 5, 2000, &tally);
    assert_met(&tally);
    assert_true(tally.partial_hits > tally.operations / 300);
}

static void test_several_groups(void **state)
{
    driver_tally tally = {0};
    (void)state;
    run(&(driver_params){.block_size = 3, .num_groups = 2}, 3, 2000, &tally);
    run(&(driver_params){.block_size = 4, .num_groups = 3}, 3, 2000, &tally);
    assert_met(&tally);
}

static void test_windows(void **state)
{
    static const driver_params managers[] = {
        {.block_size = 4, .num_groups = 1, .windows = {9}},
        {.block_size = 3, .num_groups = 2, .windows = {0, 5}},
        {.block_size = 2, .num_groups = 2, .windows = {3, 8}},
        {.block_size = 5, .num_groups = 3, .windows = {1, 0, 12}},
    };
    driver_tally tally = {0};
    (void)state;
    for (size_t i = 0; i < sizeof managers / sizeof *managers; i++)
        run(&managers[i], 3, 2000, &tally);
    assert_met(&tally);
}

static void test_swap(void **state)
{
    static const driver_params managers[] = {
        {.block_size = 4, .num_groups = 1, .swap_blocks = 20},
        {.block_size = 2, .num_groups = 1, .swap_blocks = 7},
        {.block_size = 3, .num_groups = 2, .windows = {0, 5}, .swap_blocks = 20},
        {.block_size = 2, .num_groups = 3, .windows = {3, 8, 8}, .swap_blocks = 24},
    };
    driver_tally tally = {0};
    (void)state;
    for (size_t i = 0; i < sizeof managers / sizeof *managers; i++)
        run(&managers[i], 3, 2000, &tally);
    assert_met(&tally);
    printf("%lld swaps, %lld blocks\n", (long long)tally.swaps, (long long)tally.swapped_blocks);
    assert_true(tally.swaps > tally.operations / 100);
    assert_true(tally.swapped_blocks > tally.swaps / 2);
}

/* openvino.genai #3722, vllm PR #12621: hits compare tokens, so that it does not matter what hashes are. */
static void test_one_hash(void **state)
{
    driver_tally tally = {0};
    (void)state;
    run(&(driver_params){.block_size = 2, .num_groups = 2, .windows = {0, 7}, .swap_blocks = 20, .one_hash = true}, 5,
        2000, &tally);
    assert_met(&tally);
    assert_true(tally.hits > tally.operations / 200);
}

static void test_policy(void **state)
{
    driver_tally tally = {0};
    (void)state;
    run(&(driver_params){.block_size = 3, .num_groups = 2, .windows = {0, 9}, .swap_blocks = 20, .policy = true}, 5,
        2000, &tally);
    assert_met(&tally);
    assert_true(tally.evictions > tally.operations / 100);
}

static void test_no_prefix_cache(void **state)
{
    driver_tally tally = {0};
    (void)state;
    run(&(driver_params){.block_size = 3, .num_groups = 2, .swap_blocks = 20, .no_prefix_cache = true}, 3, 2000,
        &tally);
    assert_met(&tally);
    assert_int_equal(tally.hits, 0);
}

static void test_narrow_tables(void **state)
{
    driver_tally tally = {0};
    (void)state;
    run(&(driver_params){.block_size = 4, .num_groups = 1, .max_blocks_per_seq = 13}, 5, 2000, &tally);
    assert_met(&tally);
}

static void test_no_memory(void **state)
{
    driver_tally tally = {0};
    (void)state;
    run(&(driver_params){.block_size = 3, .num_groups = 1, .failing = 2}, 10, 1000, &tally);
    assert_met(&tally);
    assert_true(tally.statuses[-KVLEAF_NO_MEMORY] > 10);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        base_seed = strtoull(argv[1], NULL, 10);
    printf("seed %llu\n", (unsigned long long)base_seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_group),      cmocka_unit_test(test_many_branches),
        cmocka_unit_test(test_several_groups), cmocka_unit_test(test_windows),
        cmocka_unit_test(test_swap),           cmocka_unit_test(test_one_hash),
        cmocka_unit_test(test_policy),         cmocka_unit_test(test_no_prefix_cache),
        cmocka_unit_test(test_narrow_tables),  cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
