/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the worked figures of the four documents the project started from, by their numbers, as far as the block
 * manager alone is concerned: 000 and 004 (the decode path's tables), 001 (blocks of four), 002 (scattered free list,
 * sharing, waste, size of a sequence). tests/test_seed_examples.c has them on the device. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvleaf/kvleaf.h>

#include "support.h"

#define SEED 20260

static kvleaf_blocks *make_blocks(int32_t num_blocks, int32_t block_size, const int32_t *order, int32_t count)
{
    kvleaf_blocks *blocks = NULL;

    ASSERT_OK(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = num_blocks, .block_size = block_size,
                                                        .free_order = order, .free_count = count),
                                   &blocks));
    return blocks;
}

static kvleaf_blocks_stats stats_of(const kvleaf_blocks *blocks)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};

    ASSERT_OK(kvleaf_blocks_query(blocks, &stats));
    assert_int_equal(stats.total, stats.used + stats.cached + stats.free);
    return stats;
}

static void extend(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t count)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = count};

    ASSERT_OK(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL));
}

/* Extends by `count` tokens and computes them, as a step does. */
static void advance(kvleaf_blocks *blocks, kvleaf_seq seq, int32_t count)
{
    const kvleaf_block_copy *copies = NULL;
    int32_t pending = 0;

    extend(blocks, seq, count);
    ASSERT_OK(kvleaf_blocks_step_begin(blocks, &seq, &count, 1));
    ASSERT_OK(kvleaf_blocks_copies(blocks, 0, &copies, &pending));
    ASSERT_OK(kvleaf_blocks_copies_done(blocks, 0, pending));
    ASSERT_OK(kvleaf_blocks_step_commit(blocks, &seq, NULL, 1));
}

static void assert_table(const kvleaf_blocks *blocks, kvleaf_seq seq, const int32_t *expected, int32_t count)
{
    int32_t table[16], in_use = -1;

    ASSERT_OK(kvleaf_blocks_seq_table(blocks, seq, 0, table, 16, &in_use));
    assert_int_equal(in_use, count);
    assert_memory_equal(table, expected, (size_t)count * sizeof *expected);
}

static void doc_000_004_decode_lengths_and_tables(void **state)
{
    const int32_t order[] = {2, 0, 3, 5, 6, 1}, cached[] = {30, 32, 70};
    const int32_t before[3][3] = {{2}, {0}, {3, 5, 6}}, after[3][3] = {{2}, {0, 1}, {3, 5, 6}};
    const int32_t count_before[] = {1, 1, 3}, count_after[] = {1, 2, 3};
    kvleaf_blocks *blocks = make_blocks(8, 32, order, 6);
    kvleaf_seq seqs[3];

    (void)state;
    for (int i = 0; i < 3; i++) {
        ASSERT_OK(kvleaf_blocks_seq_create(blocks, NULL, &seqs[i]));
        advance(blocks, seqs[i], cached[i]);
        assert_table(blocks, seqs[i], before[i], count_before[i]);
    }
    for (int i = 0; i < 3; i++) {
        int32_t used = stats_of(blocks).used;
        kvleaf_seq_info info = {.struct_size = sizeof info};

        advance(blocks, seqs[i], 1);
        assert_table(blocks, seqs[i], after[i], count_after[i]);
        assert_int_equal(stats_of(blocks).used - used, count_after[i] - count_before[i]);
        ASSERT_OK(kvleaf_blocks_seq_query(blocks, seqs[i], &info));
        assert_int_equal(info.committed, cached[i] + 1);
    }
    kvleaf_blocks_destroy(&blocks);
}

static void doc_001_fifth_position_takes_one_block(void **state)
{
    const int32_t order[] = {4, 1, 6}, table[] = {4, 1};
    kvleaf_blocks *blocks = make_blocks(8, 4, order, 3);
    kvleaf_blocks_stats start = stats_of(blocks);
    kvleaf_seq seq;

    (void)state;
    ASSERT_OK(kvleaf_blocks_seq_create(blocks, NULL, &seq));
    for (int position = 1; position <= 5; position++) {
        advance(blocks, seq, 1);
        assert_int_equal(stats_of(blocks).used - start.used, position <= 4 ? 1 : 2);
        assert_table(blocks, seq, table, position <= 4 ? 1 : 2);
    }
    assert_int_equal(stats_of(blocks).slots_wasted - start.slots_wasted, 2 * 4 - 5);
    assert_int_equal(stats_of(blocks).copies, 0);
    kvleaf_blocks_destroy(&blocks);
}

static void doc_002_scattered_free_list(void **state)
{
    const int32_t order[] = {41, 7, 19, 2, 33}, table[] = {41, 7, 19};
    kvleaf_blocks *blocks = make_blocks(64, 16, order, 5);
    kvleaf_blocks_stats start = stats_of(blocks);
    kvleaf_seq seq;

    (void)state;
    assert_int_equal(start.free, 5);
    ASSERT_OK(kvleaf_blocks_seq_create(blocks, NULL, &seq));
    extend(blocks, seq, 40);
    assert_table(blocks, seq, table, 3);
    assert_int_equal(stats_of(blocks).free, 2);
    assert_int_equal(stats_of(blocks).slots_wasted - start.slots_wasted, 8);
    assert_int_equal(2048 - stats_of(blocks).tokens, 2008); /* what a contiguous reservation leaves unused */
    kvleaf_blocks_destroy(&blocks);
}

static void doc_002_copy_on_write(void **state)
{
    const int32_t parent_table[] = {0, 1}, child_table[] = {0, 2};
    const kvleaf_block_copy *copies = NULL;
    kvleaf_blocks *blocks = make_blocks(8, 16, NULL, 0);
    kvleaf_seq parent, child;
    int32_t count = 0;

    (void)state;
    ASSERT_OK(kvleaf_blocks_seq_create(blocks, NULL, &parent));
    advance(blocks, parent, 24);
    ASSERT_OK(kvleaf_blocks_seq_fork(blocks, parent, 24, &child));
    assert_table(blocks, child, parent_table, 2);
    assert_int_equal(stats_of(blocks).used, 2);

    extend(blocks, child, 1);
    ASSERT_OK(kvleaf_blocks_copies(blocks, 0, &copies, &count));
    assert_int_equal(count, 1);
    assert_int_equal(copies[0].src, 1);
    assert_int_equal(copies[0].dst, 2);
    assert_table(blocks, parent, parent_table, 2);
    assert_table(blocks, child, child_table, 2);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 0), 2);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 2), 1);

    /* The last one to hold the block writes in place. */
    ASSERT_OK(kvleaf_blocks_copies_done(blocks, 0, 1));
    extend(blocks, parent, 1);
    ASSERT_OK(kvleaf_blocks_copies(blocks, 0, &copies, &count));
    assert_int_equal(count, 0);
    assert_table(blocks, parent, parent_table, 2);
    kvleaf_blocks_destroy(&blocks);
}

static void doc_002_three_samples_share_the_prompt(void **state)
{
    kvleaf_blocks *blocks = make_blocks(16, 16, NULL, 0);
    kvleaf_seq samples[3];

    (void)state;
    ASSERT_OK(kvleaf_blocks_seq_create(blocks, NULL, &samples[0]));
    advance(blocks, samples[0], 40);
    for (int i = 1; i < 3; i++) {
        ASSERT_OK(kvleaf_blocks_seq_fork(blocks, samples[0], 40, &samples[i]));
    }
    assert_int_equal(stats_of(blocks).used, 3);
    for (int i = 0; i < 3; i++) {
        advance(blocks, samples[i], 1);
    }
    assert_int_equal(stats_of(blocks).used, 2 + 3); /* two full blocks once, a last block each */
    assert_int_equal(stats_of(blocks).copies, 2);   /* the last to write keeps the block it has */
    for (int32_t block = 0; block < 2; block++) {
        assert_int_equal(kvleaf_blocks_refcount(blocks, 0, block), 3);
    }
    for (int i = 0; i < 3; i++) {
        kvleaf_seq_info info = {.struct_size = sizeof info};

        ASSERT_OK(kvleaf_blocks_seq_query(blocks, samples[i], &info));
        assert_int_equal(info.blocks_shared, 2);
        assert_int_equal(info.blocks_unique, 1);
    }
    kvleaf_blocks_destroy(&blocks);
}

static void doc_002_waste_is_only_in_last_blocks(void **state)
{
    enum { LIVE = 12, BLOCK = 16, STEPS = 2000 };
    kvleaf_blocks *blocks = make_blocks(512, BLOCK, NULL, 0);
    kvleaf_seq seqs[LIVE] = {0};
    int64_t lengths[LIVE] = {0};
    support_rng random = {support_seed(SEED)};

    (void)state;
    for (int step = 0; step < STEPS; step++) {
        int i = (int)((support_float(&random) + 1.0f) * 0.5f * LIVE) % LIVE;
        int64_t in_last_blocks = 0;

        if (seqs[i] && support_float(&random) > 0.6f) {
            ASSERT_OK(kvleaf_blocks_seq_destroy(blocks, &seqs[i]));
            lengths[i] = 0;
        } else {
            int64_t count = 1 + (int64_t)((support_float(&random) + 1.0f) * 25.0f);

            if (!seqs[i]) {
                ASSERT_OK(kvleaf_blocks_seq_create(blocks, NULL, &seqs[i]));
            }
            if (lengths[i] + count <= 512) {
                extend(blocks, seqs[i], count);
                lengths[i] += count;
            }
        }
        for (int j = 0; j < LIVE; j++) {
            in_last_blocks += (BLOCK - lengths[j] % BLOCK) % BLOCK;
        }
        assert_int_equal(stats_of(blocks).slots_wasted, in_last_blocks);
    }
    kvleaf_blocks_destroy(&blocks);
}

static void doc_002_size_of_a_13b_sequence(void **state)
{
    kvleaf_pool_params params = {.struct_size = sizeof params};
    kvleaf_pool_bytes bytes = {.struct_size = sizeof bytes};

    (void)state;
    params.num_layers = 40;
    params.num_kv_heads = 40;
    params.head_dim_k = 128;
    params.dtype = KVLEAF_F16;
    params.block_size = 16;
    params.num_blocks = 2048 / 16;
    ASSERT_OK(kvleaf_pool_size(NULL, &params, &bytes));
    assert_int_equal(bytes.total_bytes, 1677721600);
    assert_int_equal(bytes.token_bytes * 2048, 1677721600);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(doc_000_004_decode_lengths_and_tables),
        cmocka_unit_test(doc_001_fifth_position_takes_one_block),
        cmocka_unit_test(doc_002_scattered_free_list),
        cmocka_unit_test(doc_002_copy_on_write),
        cmocka_unit_test(doc_002_three_samples_share_the_prompt),
        cmocka_unit_test(doc_002_waste_is_only_in_last_blocks),
        cmocka_unit_test(doc_002_size_of_a_13b_sequence),
    };

    return cmocka_run_group_tests_name("seed documents, block manager", tests, NULL, NULL);
}
