/* SPDX-License-Identifier: Apache-2.0 */
/* The merge kernels of both families: values against float64, empties exactly neutral, the tree's shape, and bits that
 * do not hang on the batch. */
#include <math.h>

#include "moves.h"
#include "reference.h"

enum { NUM_HEADS = 3, GUARD = 32 };

typedef struct merge_case {
    bool cpu;
    int work_group;
    kvleaf_dtype out_dtype;
    int32_t n, rows, head_dim;
} merge_case;

/* Partials with gaps between heads, rows and parts; all in elements. */
typedef struct merge_data {
    cl_long4 outs_view, lses_view; /* offset, part, row, head stride */
    cl_long4 out_view, lse_view;   /* offset, row, head stride, -/written */
    size_t outs_count, lses_count, out_count, lse_count;
    float *outs, *lses;
    unsigned char *out; /* as the kernel left it */
    float *lse;
} merge_data;

static float *out_of(const merge_data *m, int32_t part, int32_t row, int32_t head)
{
    const cl_long *v = m->outs_view.s;
    return m->outs + v[0] + part * v[1] + row * v[2] + head * v[3];
}

static float *lse_of(const merge_data *m, int32_t part, int32_t row, int32_t head)
{
    const cl_long *v = m->lses_view.s;
    return m->lses + v[0] + part * v[1] + row * v[2] + head * v[3];
}

static size_t out_index(const merge_data *m, int32_t row, int32_t head, int32_t dim)
{
    return (size_t)(m->out_view.s[0] + row * m->out_view.s[1] + head * m->out_view.s[2] + dim);
}

static size_t lse_index(const merge_data *m, int32_t row, int32_t head)
{
    return (size_t)(m->lse_view.s[0] + row * m->lse_view.s[1] + head * m->lse_view.s[2]);
}

/* Every value is NaN until a test sets it. */
static merge_data make_data(const merge_case *c)
{
    int64_t head = c->head_dim + 1, row = head * NUM_HEADS + 2, part = row * c->rows + 3;
    int64_t lse_part = (int64_t)c->rows * NUM_HEADS * 2 + 5;
    merge_data m = {
        .outs_view = {{1, part, row, head}},
        .lses_view = {{2, lse_part, NUM_HEADS * 2, 2}},
        .out_view = {{GUARD, row, head, 0}},
        .lse_view = {{GUARD, NUM_HEADS + 1, 1, 1}},
    };
    m.outs_count = (size_t)(1 + part * (c->n + 1));
    m.lses_count = (size_t)(2 + lse_part * (c->n + 1));
    m.out_count = (size_t)(2 * GUARD + row * c->rows);
    m.lse_count = (size_t)(2 * GUARD + (NUM_HEADS + 1) * c->rows);
    m.outs = allocate(m.outs_count * sizeof(float));
    m.lses = allocate(m.lses_count * sizeof(float));
    for (size_t i = 0; i < m.outs_count; i++)
        m.outs[i] = NAN;
    for (size_t i = 0; i < m.lses_count; i++)
        m.lses[i] = NAN;
    return m;
}

static void free_data(merge_data *m)
{
    free(m->outs);
    free(m->lses);
    free(m->out);
    free(m->lse);
}

static cl_kernel merge_kernel(const merge_case *c)
{
    char options[96];
    snprintf(options, sizeof options, "-cl-std=CL1.2 -DOUT_DTYPE=%d -DWORK_GROUP=%d", (int)c->out_dtype, c->work_group);
    return make_kernel(c->cpu ? "cpu/merge.cl" : "portable/merge.cl", "kvl_merge", options);
}

/* Runs the kernel; fails where a byte outside the results changed. */
static void run_merge(const merge_case *c, merge_data *m)
{
    size_t size = kvleaf_dtype_size(c->out_dtype), out_bytes = m->out_count * size;
    size_t lse_bytes = m->lse_count * sizeof(float);
    unsigned char *before = random_bytes(out_bytes), *lse_before = random_bytes(lse_bytes);
    cl_mem outs = make_buffer(m->outs_count * sizeof(float), m->outs);
    cl_mem lses = make_buffer(m->lses_count * sizeof(float), m->lses);
    cl_mem out = make_buffer(out_bytes, before), lse = make_buffer(lse_bytes, lse_before);
    cl_int4 shape = {{NUM_HEADS, NUM_HEADS, c->head_dim, 16}}, work = {{c->n, c->rows, 0, 0}};
    const kvl_arg args[] = {
        KVL_ARG(outs),        KVL_ARG(m->outs_view), KVL_ARG(lses),        KVL_ARG(m->lses_view), KVL_ARG(out),
        KVL_ARG(m->out_view), KVL_ARG(lse),          KVL_ARG(m->lse_view), KVL_ARG(shape),        KVL_ARG(work),
    };
    cl_kernel kernel = merge_kernel(c);
    size_t groups = (size_t)c->rows * NUM_HEADS;
    launch(kernel, args, COUNT(args), groups * (size_t)c->work_group, 1, (size_t)c->work_group);
    clReleaseKernel(kernel);
    free(m->out);
    free(m->lse);
    m->out = read_buffer(out, out_bytes);
    m->lse = read_buffer(lse, lse_bytes);
    for (int32_t r = 0; r < c->rows; r++)
        for (int32_t h = 0; h < NUM_HEADS; h++) {
            memcpy(before + out_index(m, r, h, 0) * size, m->out + out_index(m, r, h, 0) * size,
                   (size_t)c->head_dim * size);
            if (m->lse_view.s[3])
                memcpy(lse_before + lse_index(m, r, h) * sizeof(float), &m->lse[lse_index(m, r, h)], sizeof(float));
        }
    check_buffer(out, out_bytes, before, "out");
    check_buffer(lse, lse_bytes, lse_before, "lse");
    clReleaseMemObject(outs);
    clReleaseMemObject(lses);
    free(before);
    free(lse_before);
}

static void set_partial(const merge_case *c, merge_data *m, int32_t part, int32_t row, int32_t head)
{
    for (int32_t d = 0; d < c->head_dim; d++)
        out_of(m, part, row, head)[d] = support_float(&rng) * 4.0f;
    *lse_of(m, part, row, head) = support_float(&rng) * 30.0f;
}

/* LSE -infinity; its values stay NaN and must not matter. */
static void set_empty(merge_data *m, int32_t part, int32_t row, int32_t head)
{
    *lse_of(m, part, row, head) = -INFINITY;
}

static void check_row(const merge_case *c, const merge_data *m, int32_t row, int32_t head)
{
    double expected[256], *outs = allocate((size_t)c->n * (size_t)c->head_dim * sizeof *outs);
    double *lses = allocate((size_t)c->n * sizeof *lses);
    float actual[256];
    for (int32_t p = 0; p < c->n; p++) {
        lses[p] = *lse_of(m, p, row, head);
        for (int32_t d = 0; d < c->head_dim; d++)
            outs[p * c->head_dim + d] = lses[p] == -INFINITY ? 0.0 : out_of(m, p, row, head)[d];
    }
    double lse = reference_merge(c->n, c->head_dim, outs, c->head_dim, lses, expected);
    for (int32_t d = 0; d < c->head_dim; d++)
        actual[d] = reference_load(c->out_dtype, m->out, out_index(m, row, head, d));
    double error = reference_row_error(expected, actual, c->head_dim);
    double tolerance = reference_tolerance(KVLEAF_F32, KVLEAF_F32, c->out_dtype);
    double lse_error = reference_lse_error(lse, m->lse[lse_index(m, row, head)], KVLEAF_F32, KVLEAF_F32, KVLEAF_F32);
    if (!(error <= tolerance) || !(lse_error <= 1.0))
        fail_msg("%s n %d row %d head %d d%d %s: error %g (at most %g), lse %g, expected %g",
                 c->cpu ? "cpu" : "portable", c->n, row, head, c->head_dim, kvleaf_dtype_name(c->out_dtype), error,
                 tolerance, m->lse[lse_index(m, row, head)], lse);
    free(outs);
    free(lses);
}

static merge_case family(int cpu)
{
    return (merge_case){.cpu = cpu, .work_group = cpu ? 1 : 64, .out_dtype = KVLEAF_F32, .head_dim = 64};
}

/* flashinfer #4051, flash-attention #1217: one partial to thousands, some empty, of some rows all. */
static void test_values(void **state)
{
    (void)state;
    static const int32_t counts[] = {1, 2, 3, 5, 7, 64, 161, 256, 3000};
    static const int32_t dims[] = {1, 16, 20, 64, 80, 128, 200, 256};
    for (int cpu = 0; cpu < 2; cpu++)
        for (int i = 0; i < COUNT(counts); i++)
            for (int dtype = KVLEAF_F16; dtype <= KVLEAF_F32; dtype++) {
                merge_case c = family(cpu);
                c.out_dtype = (kvleaf_dtype)dtype;
                c.n = counts[i];
                c.rows = counts[i] > 256 ? 2 : 5;
                c.head_dim = dims[random_below(COUNT(dims))];
                c.work_group = cpu ? 1 : dtype == KVLEAF_F32 && i % 2 ? 16 : 64;
                merge_data m = make_data(&c);
                for (int32_t r = 0; r < c.rows; r++)
                    for (int32_t h = 0; h < NUM_HEADS; h++)
                        for (int32_t p = 0; p < c.n; p++)
                            if (r == 1 || (r == 2 && p == 0) || (r > 2 && random_below(3) == 0))
                                set_empty(&m, p, r, h);
                            else
                                set_partial(&c, &m, p, r, h);
                run_merge(&c, &m);
                for (int32_t r = 0; r < c.rows; r++)
                    for (int32_t h = 0; h < NUM_HEADS; h++)
                        check_row(&c, &m, r, h);
                free_data(&m);
            }
}

/* Two or more empties: 0 and -infinity. None at all likewise. */
static void test_all_empty(void **state)
{
    (void)state;
    for (int cpu = 0; cpu < 2; cpu++)
        for (int32_t n = 0; n < 6; n++) {
            merge_case c = family(cpu);
            c.n = n;
            c.rows = 2;
            merge_data m = make_data(&c);
            for (int32_t p = 0; p < n; p++)
                for (int32_t i = 0; i < c.rows * NUM_HEADS; i++)
                    set_empty(&m, p, i / NUM_HEADS, i % NUM_HEADS);
            run_merge(&c, &m);
            for (int32_t i = 0; i < c.rows * NUM_HEADS; i++) {
                assert_true(m.lse[lse_index(&m, i / NUM_HEADS, i % NUM_HEADS)] == -INFINITY);
                for (int32_t d = 0; d < c.head_dim; d++) {
                    float x = ((float *)(void *)m.out)[out_index(&m, i / NUM_HEADS, i % NUM_HEADS, d)];
                    assert_true(x == 0.0f && !signbit(x));
                }
            }
            free_data(&m);
        }
}

/* One that is not empty among up to 18, at each place: its very bits. */
static void test_one_passes_unchanged(void **state)
{
    (void)state;
    enum { MOST = 18 };
    for (int cpu = 0; cpu < 2; cpu++)
        for (int32_t n = 1; n <= MOST; n++) {
            merge_case c = family(cpu);
            c.n = n;
            c.rows = n; /* of row r, partial r is the one */
            c.head_dim = 72;
            merge_data m = make_data(&c);
            for (int32_t r = 0; r < n; r++)
                for (int32_t h = 0; h < NUM_HEADS; h++)
                    for (int32_t p = 0; p < n; p++) {
                        if (p == r)
                            set_partial(&c, &m, p, r, h);
                        else
                            set_empty(&m, p, r, h);
                    }
            run_merge(&c, &m);
            for (int32_t r = 0; r < n; r++)
                for (int32_t h = 0; h < NUM_HEADS; h++) {
                    assert_memory_equal(m.out + out_index(&m, r, h, 0) * sizeof(float), out_of(&m, r, r, h),
                                        (size_t)c.head_dim * sizeof(float));
                    assert_memory_equal(&m.lse[lse_index(&m, r, h)], lse_of(&m, r, r, h), sizeof(float));
                }
            free_data(&m);
        }
}

/* Level by level; a missing right child leaves the left one as it is. */
static float tree_sum(const float *values, int32_t n)
{
    float level[512];
    memcpy(level, values, (size_t)n * sizeof *level);
    for (; n > 1; n = (n + 1) / 2)
        for (int32_t i = 0; i < (n + 1) / 2; i++)
            level[i] = 2 * i + 1 < n ? level[2 * i] + level[2 * i + 1] : level[2 * i];
    return n ? level[0] : 0.0f;
}

/* Equal LSEs have weights of exactly 1, so a row is the float32 sum of its values in the tree's order over n. The
 * values cancel: another order gives something else altogether. */
static void test_tree_shape(void **state)
{
    (void)state;
    static const int32_t counts[] = {2, 3, 5, 6, 7, 11, 12, 64, 100, 161, 256};
    for (int cpu = 0; cpu < 2; cpu++)
        for (int i = 0; i < COUNT(counts); i++) {
            merge_case c = family(cpu);
            c.n = counts[i];
            c.rows = 1;
            merge_data m = make_data(&c);
            for (int32_t p = 0; p < c.n; p++)
                for (int32_t h = 0; h < NUM_HEADS; h++) {
                    set_partial(&c, &m, p, 0, h);
                    *lse_of(&m, p, 0, h) = 2.5f;
                    for (int32_t d = 0; d < c.head_dim; d++)
                        out_of(&m, p, 0, h)[d] *= random_below(2) ? 1.0e7f : 1.0f;
                }
            run_merge(&c, &m);
            for (int32_t h = 0; h < NUM_HEADS; h++)
                for (int32_t d = 0; d < c.head_dim; d++) {
                    float values[512];
                    for (int32_t p = 0; p < c.n; p++)
                        values[p] = out_of(&m, p, 0, h)[d];
                    double right = tree_sum(values, c.n) / (double)c.n;
                    double got = ((float *)(void *)m.out)[out_index(&m, 0, h, d)];
                    if (fabs(got - right) >
                        4.0e-7 * fabs(right)) /* the division may be 2.5 units in the last place off */
                        fail_msg("n %d head %d dim %d: %.9g, in the tree's order %.9g", c.n, h, d, got, right);
                }
            free_data(&m);
        }
}

static void copy_row(const merge_case *c, const merge_data *from, int32_t from_row, merge_data *to, int32_t to_row)
{
    for (int32_t p = 0; p < c->n; p++)
        for (int32_t h = 0; h < NUM_HEADS; h++) {
            *lse_of(to, p, to_row, h) = *lse_of(from, p, from_row, h);
            memcpy(out_of(to, p, to_row, h), out_of(from, p, from_row, h), (size_t)c->head_dim * sizeof(float));
        }
}

static void assert_same_row(const merge_case *c, const merge_data *a, int32_t row_a, const merge_data *b, int32_t row_b)
{
    for (int32_t h = 0; h < NUM_HEADS; h++) {
        assert_memory_equal(a->out + out_index(a, row_a, h, 0) * sizeof(float),
                            b->out + out_index(b, row_b, h, 0) * sizeof(float), (size_t)c->head_dim * sizeof(float));
        assert_memory_equal(&a->lse[lse_index(a, row_a, h)], &b->lse[lse_index(b, row_b, h)], sizeof(float));
    }
}

/* Every other row is NaN throughout, so that what a work-item keeps from the row before is poison; the rows between
 * have empties at every place of the tree. */
static void test_poisoned_neighbours(void **state)
{
    (void)state;
    for (int cpu = 0; cpu < 2; cpu++) {
        merge_case c = family(cpu);
        c.n = 8;
        c.rows = 2 << 8; /* of odd row r, partial p is empty where bit p of r / 2 is set */
        merge_data m = make_data(&c);
        for (int32_t r = 0; r < c.rows; r++)
            for (int32_t i = 0; i < c.n * NUM_HEADS; i++)
                if (r % 2 == 0)
                    *lse_of(&m, i / NUM_HEADS, r, i % NUM_HEADS) = 1.0f; /* the values stay NaN */
                else if ((r / 2) >> (i / NUM_HEADS) & 1)
                    set_empty(&m, i / NUM_HEADS, r, i % NUM_HEADS);
                else
                    set_partial(&c, &m, i / NUM_HEADS, r, i % NUM_HEADS);
        run_merge(&c, &m);
        for (int32_t r = 1; r < c.rows; r += 2)
            for (int32_t h = 0; h < NUM_HEADS; h++)
                check_row(&c, &m, r, h);
        free_data(&m);
    }
}

/* A row alone, a row among others, and a row with empties behind it are the same bits; two runs too. */
static void test_same_bits(void **state)
{
    (void)state;
    for (int cpu = 0; cpu < 2; cpu++) {
        merge_case many = family(cpu), alone, longer;
        many.n = 37;
        many.rows = 9;
        many.head_dim = 80;
        alone = longer = many;
        alone.rows = longer.rows = 1;
        longer.n = 101;
        merge_data m = make_data(&many);
        for (int32_t p = 0; p < many.n; p++)
            for (int32_t i = 0; i < many.rows * NUM_HEADS; i++)
                set_partial(&many, &m, p, i / NUM_HEADS, i % NUM_HEADS);
        run_merge(&many, &m);
        for (int32_t r = 0; r < many.rows; r++) {
            merge_data a = make_data(&alone), l = make_data(&longer);
            copy_row(&many, &m, r, &a, 0);
            copy_row(&many, &m, r, &l, 0);
            for (int32_t p = many.n; p < longer.n; p++)
                for (int32_t h = 0; h < NUM_HEADS; h++)
                    set_empty(&l, p, 0, h);
            run_merge(&alone, &a);
            run_merge(&longer, &l);
            assert_same_row(&many, &m, r, &a, 0);
            assert_same_row(&many, &m, r, &l, 0);
            free_data(&a);
            free_data(&l);
        }
        free_data(&m);
    }
}

/* No LSE wanted: none written. A NaN among the partials is not hidden. */
static void test_lse_left_out_and_nan(void **state)
{
    (void)state;
    for (int cpu = 0; cpu < 2; cpu++)
        for (int at = 0; at < 3; at++) {
            merge_case c = family(cpu);
            c.n = 3;
            c.rows = 1;
            merge_data m = make_data(&c);
            m.lse_view.s[3] = 0;
            for (int32_t p = 0; p < c.n; p++)
                for (int32_t h = 0; h < NUM_HEADS; h++)
                    set_partial(&c, &m, p, 0, h);
            *lse_of(&m, at, 0, 1) = NAN;
            run_merge(&c, &m);
            for (int32_t h = 0; h < NUM_HEADS; h++)
                for (int32_t d = 0; d < c.head_dim; d++)
                    assert_int_equal(!!isnan(((float *)(void *)m.out)[out_index(&m, 0, h, d)]), h == 1);
            free_data(&m);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_all_empty),
        cmocka_unit_test(test_one_passes_unchanged),
        cmocka_unit_test(test_tree_shape),
        cmocka_unit_test(test_poisoned_neighbours),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_lse_left_out_and_nan),
    };
    return cmocka_run_group_tests_name("merge kernels", tests, open_device, close_device);
}
