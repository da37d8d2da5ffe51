/* SPDX-License-Identifier: Apache-2.0 */
/* The figures that run on the device. */
#include "tour.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool near(float value, float expected)
{
    return fabsf(value - expected) <= 1e-5f * fmaxf(1, fabsf(expected));
}

/* Figure 1. One head of dim 1; the value of every key is the number of its request, so a row's result says whose keys
 * it saw. */
void figure_varlen(tour *t)
{
    enum { TOTAL_Q = 14, TOTAL_K = 8 };
    static const int32_t cu_seqlens_q[] = {0, 10, 13, 14}, cu_seqlens_k[] = {0, 0, 1, 8};
    static const kvleaf_mask masks[] = {KVLEAF_MASK_NONE, KVLEAF_MASK_NONE, KVLEAF_MASK_NONE};
    static const int32_t request_of[TOTAL_Q] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2};
    const float q[TOTAL_Q] = {0}, k[TOTAL_K] = {0}, v[TOTAL_K] = {1, 2, 2, 2, 2, 2, 2, 2};
    float out[TOTAL_Q], lse[TOTAL_Q];
    kvleaf_attention *attention = NULL;
    kvleaf_exec exec = {.struct_size = sizeof exec, .queue = t->queue};
    cl_mem mems[] = {tour_upload(t, q, sizeof q), tour_upload(t, k, sizeof k), tour_upload(t, v, sizeof v),
                     tour_upload(t, q, sizeof q), tour_upload(t, q, sizeof q)};
    kvleaf_tensor q_in = tour_floats_tensor(mems[0]), result = tour_floats_tensor(mems[3]);
    kvleaf_tensor lse_out = tour_floats_tensor(mems[4]);
    kvleaf_kv_view view = {
        .struct_size = sizeof view, .k = tour_floats_tensor(mems[1]), .v = tour_floats_tensor(mems[2])};
    kvleaf_batch batch = {.struct_size = sizeof batch,
                          .num_seqs = 3,
                          .cu_seqlens_q = cu_seqlens_q,
                          .cu_seqlens_k = cu_seqlens_k,
                          .masks = masks};
    bool empty = true, own = true;

    tour_begin(t, 1, "Varlen: ragged requests packed in one batch", "000, 004");
    tour_say(t, "Three requests with 10, 3, 1 queries and 0, 1, 7 keys; a key's value is the number of its request.");
    tour_ints(t, "cu_seqlens_q", cu_seqlens_q, 4);
    tour_ints(t, "cu_seqlens_k", cu_seqlens_k, 4);
    tour_ints(t, "request of q row", request_of, TOTAL_Q);
    MUST(kvleaf_attention_create(t->device,
                                 kvleaf_attention_params(.num_heads = 1, .num_kv_heads = 1, .head_dim_k = 1,
                                                         .q_dtype = KVLEAF_F32, .kv_dtype = KVLEAF_F32,
                                                         .out_dtype = KVLEAF_F32),
                                 &attention));
    MUST(kvleaf_attention_plan(attention, &batch, &exec));
    MUST(kvleaf_attention_attend(attention, &q_in, &view, &result, &lse_out, &exec));
    tour_download(t, mems[3], out, sizeof out);
    tour_download(t, mems[4], lse, sizeof lse);
    tour_floats(t, "result", out, TOTAL_Q);
    for (int i = 0; i < TOTAL_Q; i++) {
        empty = empty && (i >= 10 || (out[i] == 0 && isinf(lse[i]) && lse[i] < 0));
        own = own && near(out[i], (float)request_of[i]);
    }
    tour_check(t, empty, "request 0 has no keys: its ten rows are 0, their LSE is -infinity");
    tour_check(t, own, "every row saw the keys of its own request and no others");
    tour_end(t);
    kvleaf_attention_destroy(&attention);
    for (size_t i = 0; i < sizeof mems / sizeof mems[0]; i++)
        clReleaseMemObject(mems[i]);
}

enum { F2_BLOCK = 32, F2_BLOCKS = 8, F2_SLOTS = F2_BLOCK * F2_BLOCKS };
static const int32_t f2_table[3][4] = {{2, -1, -1, -1}, {0, 1, -1, -1}, {3, 5, 6, -1}};
static const int32_t f2_cached[3] = {30, 32, 70};

/* Runs the step over pools that hold the value of each cached position; unused slots are NaN. Returns how many bytes of
 * V changed besides the three new slots. */
static int figure_2_step(tour *t, const int32_t *slots, float *out)
{
    static const int32_t cu_seqlens_q[] = {0, 1, 2, 3}, seq_lens_k[] = {31, 33, 71};
    const float q[3] = {1, 1, 1}, k_new[3] = {0}, v_new[3] = {30, 32, 70};
    float k[F2_SLOTS], v[F2_SLOTS], after[F2_SLOTS];
    kvleaf_attention *attention = NULL;
    kvleaf_exec exec = {.struct_size = sizeof exec, .queue = t->queue};
    int changed = 0;

    for (int i = 0; i < F2_SLOTS; i++)
        k[i] = v[i] = NAN;
    for (int s = 0; s < 3; s++) {
        for (int32_t position = 0; position < f2_cached[s]; position++) {
            int32_t slot = f2_table[s][position / F2_BLOCK] * F2_BLOCK + position % F2_BLOCK;
            k[slot] = 0;
            v[slot] = (float)position;
        }
    }
    cl_mem mems[] = {tour_upload(t, q, sizeof q),         tour_upload(t, k_new, sizeof k_new),
                     tour_upload(t, v_new, sizeof v_new), tour_upload(t, k, sizeof k),
                     tour_upload(t, v, sizeof v),         tour_upload(t, q, sizeof q)};
    kvleaf_tensor q_in = tour_floats_tensor(mems[0]), k_in = tour_floats_tensor(mems[1]);
    kvleaf_tensor v_in = tour_floats_tensor(mems[2]), result = tour_floats_tensor(mems[5]);
    kvleaf_kv_view view = {.struct_size = sizeof view,
                           .k = tour_floats_tensor(mems[3]),
                           .v = tour_floats_tensor(mems[4]),
                           .num_blocks = F2_BLOCKS};
    kvleaf_batch batch = {.struct_size = sizeof batch,
                          .num_seqs = 3,
                          .cu_seqlens_q = cu_seqlens_q,
                          .seq_lens_k = seq_lens_k,
                          .block_table = f2_table[0],
                          .block_table_stride = 4,
                          .num_blocks = F2_BLOCKS};
    MUST(kvleaf_attention_create(t->device,
                                 kvleaf_attention_params(.num_heads = 1, .num_kv_heads = 1, .head_dim_k = 1,
                                                         .q_dtype = KVLEAF_F32, .kv_dtype = KVLEAF_F32,
                                                         .out_dtype = KVLEAF_F32, .block_size = F2_BLOCK),
                                 &attention));
    MUST(kvleaf_attention_plan(attention, &batch, &exec));
    MUST(kvleaf_attention_append(attention, &k_in, &v_in, &view, &exec));
    MUST(kvleaf_attention_attend(attention, &q_in, &view, &result, NULL, &exec));
    tour_download(t, mems[5], out, 3 * sizeof *out);
    tour_download(t, mems[4], after, sizeof after);
    for (int s = 0; s < 3; s++)
        v[slots[s]] = v_new[s];
    for (size_t i = 0; i < sizeof v; i++)
        changed += ((const char *)v)[i] != ((const char *)after)[i];
    kvleaf_attention_destroy(&attention);
    for (size_t i = 0; i < sizeof mems / sizeof mems[0]; i++)
        clReleaseMemObject(mems[i]);
    return changed;
}

/* Figure 2. The value of position i is i, all keys are 0: the result is the mean of the positions. */
void figure_decode(tour *t)
{
    int32_t slots[3];
    float out[3];

    tour_begin(t, 2, "Decode: one token a sequence through the block table, cache updated in place", "000, 004");
    tour_say(t, "Block size 32, at most 4 blocks a sequence, -1 = unassigned; the value of position i is i.");
    tour_ints(t, "cache_seqlens", f2_cached, 3);
    tour_ints(t, "block_table[0]", f2_table[0], 4);
    tour_ints(t, "block_table[1]", f2_table[1], 4);
    tour_ints(t, "block_table[2]", f2_table[2], 4);
    for (int s = 0; s < 3; s++) {
        int32_t block = f2_table[s][f2_cached[s] / F2_BLOCK], offset = f2_cached[s] % F2_BLOCK;

        slots[s] = block * F2_BLOCK + offset;
        tour_say(t, "sequence %d: the new token goes to block %d, slot %d", s, block, offset);
    }
    tour_ints(t, "slot_mapping", slots, 3);
    tour_check(t, figure_2_step(t, slots, out) == 0, "the three slots are written, every other byte is unchanged");
    tour_floats(t, "result", out, 3);
    tour_check(t, near(out[0], 15) && near(out[1], 16) && near(out[2], 35), "the means of 31, 33 and 71 positions");
    tour_end(t);
}

/* One sequence of five positions, keys 0, query 1, the value of position i (from 1) is i; results after each position.
 */
static void scalar_head(tour *t, const int32_t *free_order, const char *name, float *means)
{
    const float one = 1, zero = 0;
    small s = {.heads = 1, .dim = 1};
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    int32_t table[16], used_at_four = 0;
    kvleaf_seq seq;

    small_open(t, &s, 8, 4, free_order, 2);
    MUST(kvleaf_seq_create(s.cache, NULL, &seq));
    for (int position = 1; position <= 5; position++) {
        float value = (float)position;

        small_step(t, &s, seq, 1, &one, &zero, &value, &means[position - 1], NULL, NULL);
        MUST(kvleaf_cache_query(s.cache, &stats));
        if (position == 4)
            used_at_four = stats.used;
    }
    small_table(t, &s, seq, name, table);
    tour_check(t, stats.used == used_at_four + 1, "the fifth position took exactly one more block");
    small_close(&s);
}

void figure_scalar_head(tour *t)
{
    static const int32_t order[] = {4, 1}, moved_order[] = {2, 7};
    float means[5], moved[5];

    tour_begin(t, 3, "Logical order is not physical place", "001");
    tour_say(t, "Block size 4, one scalar head; keys 0, query 1, values 1 2 3 4 5: the result is their mean.");
    scalar_head(t, order, "table", means);
    scalar_head(t, moved_order, "moved to", moved);
    tour_floats(t, "result", means, 5);
    tour_check(t, near(means[4], 3), "five positions: the mean is 3");
    tour_check(t, memcmp(means, moved, sizeof means) == 0, "the same bits from other blocks");
    tour_end(t);
}

void figure_scattered(tour *t)
{
    enum { TOKENS = 40, DIM = 64, BLOCK = 16 };
    static const int32_t order[] = {41, 7, 19, 2, 33};
    static float q[TOKENS * DIM], k[TOKENS * DIM], v[TOKENS * DIM], out[TOKENS * DIM], k_back[TOKENS * DIM],
        v_back[TOKENS * DIM];
    small s = {.heads = 1, .dim = DIM};
    int32_t table[16], count, unused;
    uint32_t random = 1;
    kvleaf_seq seq;

    for (int i = 0; i < TOKENS * DIM; i++) {
        random = random * 1664525u + 1013904223u;
        q[i] = k[i] = (float)(random >> 8) / 16777216.0f - 0.5f;
        v[i] = -k[i];
    }
    tour_begin(t, 4, "A scattered free list", "002");
    tour_say(t, "Block size 16, head_dim 64, a pool of 64 blocks; a 40-token request takes what is free.");
    tour_ints(t, "free list", order, 5);
    small_open(t, &s, 64, BLOCK, order, 5);
    MUST(kvleaf_seq_create(s.cache, NULL, &seq));
    small_step(t, &s, seq, TOKENS, q, k, v, out, k_back, v_back);
    count = small_table(t, &s, seq, "block_table", table);
    unused = count * BLOCK - TOKENS;
    tour_check(t, count == 3 && memcmp(table, order, 3 * sizeof *table) == 0, "ceil(40 / 16) = 3 blocks, first come");
    tour_check(t, memcmp(k, k_back, sizeof k) == 0 && memcmp(v, v_back, sizeof v) == 0,
               "keys and values gathered through the table are bit-equal to those written");
    tour_say(t, "unused slots: %d paged, %d with a reservation of 2048 tokens", unused, 2048 - TOKENS);
    tour_check(t, unused == 8, "8 unused slots");
    tour_end(t);
    small_close(&s);
}

/* Two sequences over one block of 16, the second forked off after six tokens. */
void figure_copy_on_write(tour *t)
{
    static const float q[6] = {1, 1, 1, 1, 1, 1}, k[6] = {0}, v[6] = {1, 2, 3, 4, 5, 6}, other = 100, own = 7;
    float out[6], k_back[7], v_back[7], forked[7];
    int32_t before[16], parent_table[16], child_table[16];
    small s = {.heads = 1, .dim = 1};
    kvleaf_seq parent, child;

    tour_begin(t, 5, "Copy-on-write", "002");
    small_open(t, &s, 8, 16, NULL, 0);
    MUST(kvleaf_seq_create(s.cache, NULL, &parent));
    small_step(t, &s, parent, 6, q, k, v, out, NULL, NULL);
    MUST(kvleaf_seq_fork(s.cache, parent, 6, &child));
    small_table(t, &s, parent, "parent", before);
    small_table(t, &s, child, "child, forked", child_table);
    tour_check(t,
               before[0] == child_table[0] && kvleaf_blocks_refcount(kvleaf_cache_blocks(s.cache), 0, before[0]) == 2,
               "the fork took no block: both use the same one, reference count 2");
    small_step(t, &s, child, 1, q, k, &other, out, k_back, forked);
    small_table(t, &s, child, "child, after writing", child_table);
    small_step(t, &s, parent, 1, q, k, &own, out, k_back, v_back);
    small_table(t, &s, parent, "parent, after", parent_table);
    tour_floats(t, "values of the child", forked, 7);
    tour_floats(t, "values of the parent", v_back, 7);
    tour_check(t, child_table[0] != before[0] && parent_table[0] == before[0], "the child got a copy of the block");
    tour_check(t,
               memcmp(v_back, v, sizeof v) == 0 && v_back[6] == own && memcmp(forked, v, sizeof v) == 0 &&
                   forked[6] == other,
               "both kept the six shared tokens, each has its own seventh");
    tour_end(t);
    small_close(&s);
}

void figure_samples(tour *t)
{
    enum { PROMPT = 40 };
    static const char *const names[] = {"sample 0", "sample 1", "sample 2"};
    static float ones[PROMPT], zeros[PROMPT], out[PROMPT];
    int32_t table[16];
    small s = {.heads = 1, .dim = 1};
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    kvleaf_seq samples[3];

    for (int i = 0; i < PROMPT; i++)
        ones[i] = 1;
    tour_begin(t, 6, "Three samples of one prompt (n = 3)", "002");
    tour_say(t, "A prompt of 40 tokens in blocks of 16, then a different token for each sample.");
    small_open(t, &s, 16, 16, NULL, 0);
    MUST(kvleaf_seq_create(s.cache, NULL, &samples[0]));
    small_step(t, &s, samples[0], PROMPT, ones, zeros, ones, out, NULL, NULL);
    for (int i = 1; i < 3; i++)
        MUST(kvleaf_seq_fork(s.cache, samples[0], PROMPT, &samples[i]));
    for (int i = 0; i < 3; i++) {
        float value = (float)(41 * (i + 1) + 1); /* 40 ones and this: the mean is i + 2 */

        small_step(t, &s, samples[i], 1, ones, zeros, &value, &out[i], NULL, NULL);
    }
    for (int i = 0; i < 3; i++)
        small_table(t, &s, samples[i], names[i], table);
    MUST(kvleaf_cache_query(s.cache, &stats));
    tour_check(t,
               kvleaf_blocks_refcount(kvleaf_cache_blocks(s.cache), 0, table[0]) == 3 &&
                   kvleaf_blocks_refcount(kvleaf_cache_blocks(s.cache), 0, table[1]) == 3,
               "the two full blocks of the prompt are there once, reference count 3");
    tour_check(t, stats.used == 5, "5 blocks in use where three copies would take 9");
    tour_floats(t, "result", out, 3);
    tour_check(t, near(out[0], 2) && near(out[1], 3) && near(out[2], 4), "each sample sees its own last token");
    tour_end(t);
    small_close(&s);
}

/* The documents describe this one and print no figure of it. */
void figure_prefix_cache(tour *t)
{
    enum { PROMPT = 40, DIM = 64, BLOCK = 16, FOUND = PROMPT / BLOCK * BLOCK };
    static float q[PROMPT * DIM], k[PROMPT * DIM], v[PROMPT * DIM], cold[PROMPT * DIM], warm[PROMPT * DIM];
    const float *rest_q = q + FOUND * DIM, *rest_k = k + FOUND * DIM, *rest_v = v + FOUND * DIM;
    small s = {.heads = 1, .dim = DIM};
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    int32_t ids[PROMPT], first[16], second[16];
    uint32_t random = 10;
    kvleaf_seq seq;

    for (int i = 0; i < PROMPT * DIM; i++) {
        random = random * 1664525u + 1013904223u;
        q[i] = k[i] = (float)(random >> 8) / 16777216.0f - 0.5f;
        v[i] = 1 - k[i];
        ids[i % PROMPT] = 100 + i % PROMPT;
    }
    tour_begin(t, 10, "Prefix cache: a second request with the same prompt", "001, 002");
    tour_say(t, "A prompt of 40 tokens in blocks of 16; the first request is over when the second comes.");
    small_open(t, &s, 8, BLOCK, NULL, 0);
    MUST(kvleaf_seq_create(s.cache, NULL, &seq));
    int32_t found = small_extend(t, &s, seq, ids, PROMPT);
    tour_check(t, found == 0, "the first request finds nothing");
    small_compute(t, &s, seq, PROMPT, q, k, v, cold, NULL, NULL);
    small_table(t, &s, seq, "first request", first);
    MUST(kvleaf_seq_destroy(s.cache, &seq));
    MUST(kvleaf_cache_query(s.cache, &stats));
    tour_check(t, stats.used == 0 && stats.cached == 2, "its two full blocks stay cached, nothing is in use");
    MUST(kvleaf_seq_create(s.cache, NULL, &seq));
    found = small_extend(t, &s, seq, ids, PROMPT);
    tour_ints(t, "tokens found", &found, 1);
    small_compute(t, &s, seq, PROMPT - FOUND, rest_q, rest_k, rest_v, warm, NULL, NULL);
    small_table(t, &s, seq, "second request", second);
    tour_check(t, found == FOUND && memcmp(first, second, 2 * sizeof *first) == 0,
               "the second finds 32 tokens in the same two blocks and computes 8");
    tour_check(t, memcmp(cold + FOUND * DIM, warm, (PROMPT - FOUND) * DIM * sizeof *warm) == 0,
               "their results are those of the first request, bit for bit");
    tour_end(t);
    small_close(&s);
}
