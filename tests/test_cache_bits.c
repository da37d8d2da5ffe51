/* SPDX-License-Identifier: Apache-2.0 */
/* Results that do not depend on their surroundings, bit for bit, through the managed cache: how a prompt was chunked,
 * what else is in the batch, which blocks the data lies in, whether a prefix was shared. */
#include <stdlib.h>
#include <string.h>

#include "rig.h"

/* What the model computed for one sequence, row after row. */
typedef struct rows {
    uint8_t *out;
    float *lse;
    int32_t count;
} rows;

static rows make_rows(const rig *r, int32_t most)
{
    size_t layers = (size_t)r->p.num_layers;
    return (rows){.out = calloc((size_t)most * layers, rig_row_bytes(r, 0)),
                  .lse = calloc((size_t)most * layers * (size_t)r->p.num_heads, sizeof(float))};
}

static void free_rows(rows *a)
{
    free(a->out);
    free(a->lse);
}

/* Adds `count` rows of the last step, all layers, from its row `first`. */
static void add_rows(const rig *r, rows *to, int32_t first, int32_t count)
{
    for (int32_t i = 0; i < count; i++, to->count++)
        for (int32_t layer = 0; layer < r->p.num_layers; layer++) {
            size_t at = (size_t)(to->count * r->p.num_layers + layer), heads = (size_t)r->p.num_heads;
            memcpy(to->out + at * rig_row_bytes(r, 0), rig_out(r, layer, first + i), rig_row_bytes(r, 0));
            memcpy(to->lse + at * heads, rig_lse(r, layer, first + i), heads * sizeof(float));
        }
}

static void assert_same_rows(const rig *r, const rows *a, int32_t first_a, const rows *b, int32_t first_b,
                             int32_t count, const char *what)
{
    size_t row = rig_row_bytes(r, 0) * (size_t)r->p.num_layers, lse = (size_t)(r->p.num_layers * r->p.num_heads);
    for (int32_t i = 0; i < count; i++) {
        size_t at_a = (size_t)(first_a + i), at_b = (size_t)(first_b + i);
        if (memcmp(a->out + at_a * row, b->out + at_b * row, row) ||
            memcmp(a->lse + at_a * lse, b->lse + at_b * lse, lse * sizeof(float)))
            fail_msg("%s: row %d differs", what, first_a + i);
    }
}

static const int32_t order[64] = {
    37, 2,  61, 14, 55, 29, 8,  40, 19, 3,  58, 33, 24, 11, 47, 6,  52, 17, 63, 30, 1,  44,
    27, 9,  36, 50, 21, 12, 59, 5,  42, 31, 16, 57, 25, 0,  48, 38, 10, 62, 20, 34, 53, 7,
    45, 28, 15, 60, 4,  39, 23, 54, 13, 32, 49, 18, 43, 26, 56, 35, 22, 41, 46, 51,
};

/* Geometries of test_cache_step.c, whose programs serve here too. */
typedef struct bits_case {
    const char *name;
    kvleaf_dtype kv_dtype;
    int32_t num_heads, num_kv_heads, head_dim, block_size;
} bits_case;

static const bits_case cases[] = {
    {"f32 b16", KVLEAF_F32, 4, 2, 64, 16},
    {"f16 b7", KVLEAF_F16, 5, 1, 17, 7},
};

static rig_params params_of(const bits_case *at)
{
    rig_params p = rig_defaults();
    p.kv_dtype = at->kv_dtype, p.head_dim = at->head_dim, p.block_size = at->block_size;
    p.num_heads = at->num_heads, p.num_kv_heads = at->num_kv_heads;
    return p;
}

/* A prompt of 61 tokens, whole, and in chunks in other blocks beside other sequences: the same rows and the same stored
 * bytes. sgl-kernel-xpu #196. */
static void test_chunked_prefill(void **state)
{
    (void)state;
    static const int32_t chunks[][8] = {{61}, {16, 16, 16, 13}, {1, 1, 30, 29}, {15, 1, 21, 24}, {60, 1}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        rows whole = {0};
        for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++) {
            rig r;
            rig_params p = params_of(&cases[c]);
            p.free_order = k % 2 ? order : NULL;
            rig_open(&r, &p);
            rig_seq *seq = rig_seq_new(&r), *beside = rig_seq_new(&r);
            rig_extend(&r, seq, 61);
            rig_extend(&r, beside, 100);
            rows got = make_rows(&r, 61);
            for (int32_t i = 0; seq->committed < 61; i++) {
                int32_t others = (int32_t)k * 3; /* rows before it in the batch */
                rig_step step = {.n = 1, .seqs = {seq}, .num_q = {chunks[k][i]}, .family = KVLEAF_FAMILY_PREFILL};
                if (others) {
                    step = (rig_step){.n = 2,
                                      .seqs = {beside, seq},
                                      .num_q = {others, chunks[k][i]},
                                      .family = KVLEAF_FAMILY_PREFILL};
                }
                rig_run(&r, &step, cases[c].name);
                add_rows(&r, &got, others, chunks[k][i]);
            }
            rig_check_stored(&r, seq, cases[c].name);
            if (k == 0) {
                whole = got;
            } else {
                assert_same_rows(&r, &whole, 0, &got, 0, 61, cases[c].name);
                free_rows(&got);
            }
            rig_close(&r);
        }
        free_rows(&whole);
    }
}

/* Decode alone, and in batches that change with every step, in shuffled blocks, over a forked prefix. */
static void test_decode_in_any_batch(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        rows alone = {0};
        int32_t prompt[45], next[12];
        for (int32_t i = 0; i < 45; i++)
            prompt[i] = 1000 + i;
        for (int32_t i = 0; i < 12; i++)
            next[i] = 2000 + i;
        for (int32_t batched = 0; batched < 2; batched++) {
            rig r;
            rig_params p = params_of(&cases[c]);
            p.free_order = batched ? order : NULL;
            rig_open(&r, &p);
            rig_seq *seq = rig_seq_new(&r), *others[3];
            rig_extend_with(&r, seq, prompt, 45);
            rig_run_one(&r, seq, 45, KVLEAF_FAMILY_PREFILL, cases[c].name);
            for (int32_t i = 0; i < 3; i++) {
                others[i] = rig_seq_fork(&r, seq, 40 + i);
                rig_extend(&r, others[i], 1);
            }
            rows got = make_rows(&r, 12);
            for (int32_t i = 0; i < 12; i++) {
                rig_extend_with(&r, seq, &next[i], 1);
                rig_step step = {.family = KVLEAF_FAMILY_DECODE};
                int32_t before = batched ? i % 4 : 0;
                for (int32_t j = 0; j < before; j++) {
                    step.seqs[step.n] = others[j];
                    step.num_q[step.n++] = 1;
                }
                step.seqs[step.n] = seq;
                step.num_q[step.n++] = 1;
                rig_run(&r, &step, cases[c].name);
                add_rows(&r, &got, before, 1);
                for (int32_t j = 0; j < before; j++)
                    rig_extend(&r, others[j], 1);
            }
            if (!batched) {
                alone = got;
            } else {
                assert_same_rows(&r, &alone, 0, &got, 0, 12, cases[c].name);
                free_rows(&got);
            }
            rig_close(&r);
        }
        free_rows(&alone);
    }
}

/* Several rows of one sequence by the decode family are the rows that single steps give: drafts verified at once. */
static void test_drafts_at_once(void **state)
{
    (void)state;
    rig r;
    rig_params p = params_of(&cases[0]);
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r);
    rig_extend(&r, seq, 30);
    rig_run_one(&r, seq, 30, KVLEAF_FAMILY_PREFILL, "prompt");
    rows single = make_rows(&r, 6), joint = make_rows(&r, 6);
    rig_seq *child = rig_seq_fork(&r, seq, 30);
    rig_extend(&r, seq, 6);
    rig_extend_with(&r, child, seq->tokens + 30, 6);
    rig_run_one(&r, seq, 6, KVLEAF_FAMILY_DECODE, "at once");
    add_rows(&r, &joint, 0, 6);
    for (int32_t i = 0; i < 6; i++) {
        rig_run_one(&r, child, 1, KVLEAF_FAMILY_DECODE, "one by one");
        add_rows(&r, &single, 0, 1);
    }
    assert_same_rows(&r, &single, 0, &joint, 0, 6, "drafts");
    free_rows(&single);
    free_rows(&joint);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunked_prefill),
        cmocka_unit_test(test_decode_in_any_batch),
        cmocka_unit_test(test_drafts_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
