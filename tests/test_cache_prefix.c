/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix cache through the whole library: a request that finds its prompt gives the bits of one that computed it,
 * also with windowed layers; samples hold their prompt once; what another request may not find it does not. */
#include <stdlib.h>
#include <string.h>

#include "rig.h"
#include "stats.h"

enum { WINDOW = 10, MOST = 64 };

typedef struct prefix_case {
    const char *name;
    kvleaf_layout layout;
    int32_t head_dim, block_size, window; /* of one of the layers; 0 = all alike */
} prefix_case;

static const prefix_case cases[] = {
    {"rows, a window", KVLEAF_LAYOUT_ROWS, 16, 4, WINDOW},
    {"packed, a window", KVLEAF_LAYOUT_CPU16, 64, 16, WINDOW},
};

static rig_params params_of(const prefix_case *c)
{
    rig_params p = rig_defaults();
    p.layout = c->layout;
    p.head_dim = c->head_dim;
    p.block_size = c->block_size;
    p.window[1] = c->window;
    p.num_blocks = 256 / c->block_size + 8;
    return p;
}

static void fill_prompt(int32_t *prompt, int32_t first)
{
    for (int32_t i = 0; i < MOST; i++)
        prompt[i] = first + i;
}

/* A sequence of its own that neither finds nor leaves anything in the prefix cache. */
static rig_seq *cold_seq(rig *r)
{
    return rig_seq_with(r, &(kvleaf_seq_params){.struct_size = sizeof(kvleaf_seq_params), .no_prefix = 1});
}

/* Computes what a sequence has extended and not computed, by the prefill family, and returns the bits of its rows from
 * position `from` on. */
static uint8_t *compute(rig *r, rig_seq *seq, int32_t from, const char *what)
{
    int32_t before = seq->committed, count = seq->extended - before;
    rig_run_one(r, seq, count, KVLEAF_FAMILY_PREFILL, what);
    size_t row = rig_row_bytes(r, 0);
    uint8_t *bits = calloc((size_t)(MOST * r->p.num_layers), row), *at = bits;
    for (int32_t i = from > before ? from : before; i < seq->committed; i++)
        for (int32_t layer = 0; layer < r->p.num_layers; layer++, at += row)
            memcpy(at, rig_out(r, layer, i - before), row);
    return bits;
}

/* vllm PR #3239, PR #11186: prompts of about a block or two, each twice, then a longer one: at least one token is left
 * to compute, and its rows are those of a run that found nothing. */
static void test_hit_equals_cold(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int32_t bs = cases[c].block_size, lengths[] = {bs - 1, bs, bs + 1, 2 * bs, 2 * bs + 1, 3 * bs - 1};
        rig r;
        rig_params p = params_of(&cases[c]);
        rig_open(&r, &p);
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            int32_t length = lengths[i], prompt[MOST];
            fill_prompt(prompt, 1000 + 100 * (int32_t)i);
            for (int32_t turn = 0; turn < 3; turn++) {
                int32_t count = turn < 2 ? length : length + 5;
                rig_seq *seq = rig_seq_new(&r), *cold = cold_seq(&r);
                rig_extend_with(&r, seq, prompt, count);
                rig_extend_with(&r, cold, prompt, count);
                assert_int_equal(cold->committed, 0);
                assert_true(seq->committed < count);
                if (turn == 0)
                    assert_int_equal(seq->committed, 0);
                else
                    assert_true(seq->committed >= (length - 1) / bs * bs);
                rig_check_lengths(&r, seq, seq->committed);
                int32_t found = seq->committed;
                uint8_t *hit = compute(&r, seq, found, cases[c].name), *all = compute(&r, cold, found, cases[c].name);
                if (memcmp(hit, all, (size_t)((count - found) * p.num_layers) * rig_row_bytes(&r, 0)))
                    fail_msg("%s: prompt of %d, request %d, which found %d: other bits than cold", cases[c].name, count,
                             turn, found);
                rig_check_stored(&r, seq, cases[c].name);
                free(hit);
                free(all);
                rig_seq_end(&r, seq);
                rig_seq_end(&r, cold);
            }
        }
        assert_true(rig_stats(&r).hits > 0);
        rig_close(&r);
    }
}

/* Three samples of one prompt hold its blocks once, and each goes its own way in blocks of its own. */
static void test_samples_share_the_prompt(void **state)
{
    (void)state;
    rig r;
    rig_params p = params_of(&cases[0]);
    rig_open(&r, &p);
    int32_t prompt[MOST], table[16], count;
    fill_prompt(prompt, 1);
    rig_seq *first = rig_seq_new(&r);
    rig_extend_with(&r, first, prompt, 18);
    rig_run_one(&r, first, 18, KVLEAF_FAMILY_PREFILL, "prompt");
    kvleaf_blocks_stats alone = rig_stats(&r);
    rig_seq *samples[] = {first, rig_seq_fork(&r, first, 18), rig_seq_fork(&r, first, 18)};
    assert_int_equal(rig_stats(&r).used, alone.used);
    ASSERT_OK(kvleaf_seq_table(r.cache, first->seq, 0, table, 16, &count));
    assert_int_equal(count, 5);
    for (int32_t i = 0; i < count; i++)
        assert_int_equal(kvleaf_blocks_refcount(kvleaf_cache_blocks(r.cache), 0, table[i]), 3);
    rig_step step = {.n = 3};
    for (int32_t i = 0; i < 3; i++) {
        rig_extend(&r, samples[i], 1);
        step.seqs[i] = samples[i];
        step.num_q[i] = 1;
    }
    rig_run(&r, &step, "samples");
    for (int32_t i = 0; i < 4; i++)
        assert_int_equal(kvleaf_blocks_refcount(kvleaf_cache_blocks(r.cache), 0, table[i]), 3);
    assert_int_equal(rig_stats(&r).used, alone.used + 2 * r.num_groups); /* a last block more for each of two */
    for (int32_t i = 0; i < 3; i++)
        rig_check_stored(&r, samples[i], "sample");
    rig_close(&r);
}

/* The longest match inside the next block is taken by a copy, which the step makes first; in every group. */
static void test_partial_match(void **state)
{
    (void)state;
    rig r;
    rig_params p = params_of(&cases[0]);
    rig_open(&r, &p);
    int32_t prompt[MOST], other[MOST];
    fill_prompt(prompt, 1);
    fill_prompt(other, 1);
    for (int32_t i = 11; i < MOST; i++)
        other[i] += 500;
    rig_seq *a = rig_seq_new(&r), *b = rig_seq_new(&r);
    rig_extend_with(&r, a, prompt, 17);
    rig_run_one(&r, a, 17, KVLEAF_FAMILY_PREFILL, "prompt");
    rig_extend_with(&r, b, other, 15);
    assert_int_equal(b->committed, 11);
    rig_run_one(&r, b, 4, KVLEAF_FAMILY_PREFILL, "behind a partial match");
    rig_check_stored(&r, a, "source");
    rig_check_stored(&r, b, "partial match");
    rig_close(&r);
}

/* Beams are rearranged: parents in, children out; everyone goes on from what its parent had. */
static void test_rearranged_beams(void **state)
{
    (void)state;
    rig r;
    rig_params p = params_of(&cases[0]);
    rig_open(&r, &p);
    rig_seq *beams[4] = {rig_seq_new(&r)};
    rig_extend(&r, beams[0], 14);
    rig_run_one(&r, beams[0], 14, KVLEAF_FAMILY_PREFILL, "prompt");
    for (int32_t i = 1; i < 4; i++)
        beams[i] = rig_seq_fork(&r, beams[0], 14);
    static const int32_t parents[][4] = {{0, 1, 2, 3}, {1, 1, 0, 3}, {3, 2, 1, 0}, {2, 2, 2, 2}, {0, 0, 3, 1}};
    for (size_t turn = 0; turn < sizeof parents / sizeof *parents; turn++) {
        rig_step step = {.n = 4};
        kvleaf_seq seqs[4];
        for (int32_t i = 0; i < 4; i++) {
            rig_extend(&r, beams[i], 1);
            step.seqs[i] = beams[i];
            step.num_q[i] = 1;
            seqs[i] = beams[i]->seq;
        }
        rig_run(&r, &step, "beams");
        ASSERT_OK(kvleaf_seq_rearrange(r.cache, seqs, parents[turn], 4));
        rig_seq before[4];
        for (int32_t i = 0; i < 4; i++)
            before[i] = *beams[i];
        for (int32_t i = 0; i < 4; i++) {
            *beams[i] = before[parents[turn][i]];
            beams[i]->seq = seqs[i];
            rig_check_lengths(&r, beams[i], beams[i]->committed);
            rig_check_stored(&r, beams[i], "rearranged");
        }
    }
    for (int32_t i = 0; i < 4; i++)
        rig_seq_end(&r, beams[i]);
    assert_int_equal(rig_stats(&r).used, 0);
    rig_close(&r);
}

/* A windowed pool that holds the windows alone serves prompts many times as long. */
static void test_long_prompts_in_a_small_window_pool(void **state)
{
    (void)state;
    rig r;
    rig_params p = params_of(&cases[0]);
    p.window_blocks = 12;
    p.num_blocks = 48;
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r);
    for (int32_t i = 0; i < 12; i++) {
        rig_extend(&r, seq, 13);
        rig_run_one(&r, seq, 13, KVLEAF_FAMILY_AUTO, "chunk");
    }
    rig_check_stored(&r, seq, "156 tokens through 48 slots");
    kvleaf_blocks_stats group = {.struct_size = sizeof group};
    ASSERT_OK(kvleaf_blocks_query_group(kvleaf_cache_blocks(r.cache), 1, &group));
    assert_true(group.used <= (WINDOW + p.block_size - 2) / p.block_size + 1);
    int32_t table[MOST], count;
    ASSERT_OK(kvleaf_seq_table(r.cache, seq->seq, 1, table, MOST, &count));
    assert_int_equal(count, 39);
    assert_int_equal(table[0], KVLEAF_NO_BLOCK);
    uint8_t bytes[4096];
    const kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
    ASSERT_FAILS(KVLEAF_INVALID, "start", kvleaf_seq_export(r.cache, seq->seq, 0, 1, bytes, sizeof bytes, &exec));
    ASSERT_OK(kvleaf_seq_export(r.cache, seq->seq, 155, 1, bytes, sizeof bytes, &exec));
    rig_close(&r);
}

/* The calls on the manager, once each: match looks and changes nothing, ids come later, clearing forgets, a pinned
 * block stays. */
static void test_calls(void **state)
{
    (void)state;
    rig r;
    rig_params p = params_of(&cases[0]);
    p.window[1] = 0;
    rig_open(&r, &p);
    int32_t prompt[MOST], table[16], count;
    int64_t matched = -1;
    fill_prompt(prompt, 1);
    const kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = prompt, .count = 20};
    const kvleaf_seq_params salted = {.struct_size = sizeof salted, .salt = 7};
    rig_seq *seq = rig_seq_new(&r);
    ASSERT_OK(kvleaf_prefix_match(r.cache, NULL, &tokens, &matched));
    assert_int_equal(matched, 0);
    r.next_token = 1; /* the ids of the prompt, which the cache is not told of yet */
    rig_extend(&r, seq, 20);
    rig_run_one(&r, seq, 20, KVLEAF_FAMILY_PREFILL, "prompt");
    ASSERT_OK(kvleaf_prefix_match(r.cache, NULL, &tokens, &matched));
    assert_int_equal(matched, 0);
    ASSERT_OK(kvleaf_seq_set_ids(r.cache, seq->seq, 0, prompt, 20));
    kvleaf_blocks_stats before = rig_stats(&r);
    ASSERT_OK(kvleaf_prefix_match(r.cache, NULL, &tokens, &matched));
    assert_true(matched >= 16 && matched < 20);
    int64_t other = -1;
    ASSERT_OK(kvleaf_prefix_match(r.cache, &salted, &tokens, &other));
    assert_int_equal(other, 0);
    kvleaf_blocks_stats after = rig_stats(&r);
    assert_true(same_stats(&before, &after));
    rig_seq *hit = rig_seq_new(&r), *miss = rig_seq_with(&r, &salted);
    rig_extend_with(&r, hit, prompt, 20);
    assert_int_equal(hit->committed, matched);
    rig_extend_with(&r, miss, prompt, 20);
    assert_int_equal(miss->committed, 0);
    ASSERT_OK(kvleaf_seq_table(r.cache, seq->seq, 0, table, 16, &count));
    ASSERT_OK(kvleaf_block_pin(r.cache, 0, table[0]));
    rig_seq_end(&r, seq);
    rig_seq_end(&r, hit);
    rig_seq_end(&r, miss);
    assert_true(rig_stats(&r).pinned > 0);
    ASSERT_OK(kvleaf_block_unpin(r.cache, 0, table[0]));
    assert_int_equal(rig_stats(&r).pinned, 0);
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_block_unpin(r.cache, 0, table[0]));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_block_pin(r.cache, 1, table[0]));
    ASSERT_OK(kvleaf_prefix_clear(r.cache));
    ASSERT_OK(kvleaf_prefix_match(r.cache, NULL, &tokens, &matched));
    assert_int_equal(matched, 0);
    assert_int_equal(rig_stats(&r).cached, 0);
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_prefix_match(NULL, NULL, &tokens, &matched));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_prefix_clear(NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_set_ids(NULL, 1, 0, prompt, 1));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_rearrange(NULL, NULL, NULL, 0));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_block_pin(NULL, 0, 0));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_cache_describe(NULL, KVLEAF_FORMAT_TEXT, NULL, 0, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_block_unpin(NULL, 0, 0));
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hit_equals_cold), cmocka_unit_test(test_samples_share_the_prompt),
        cmocka_unit_test(test_partial_match),   cmocka_unit_test(test_rearranged_beams),
        cmocka_unit_test(test_calls),           cmocka_unit_test(test_long_prompts_in_a_small_window_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
