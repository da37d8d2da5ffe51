/* SPDX-License-Identifier: Apache-2.0 */
/* Which shapes a pass runs. Shapes that share a program stand next to each other, since building programs takes most of
 * the time on CPU drivers. */
#include "check/check.h"

#include <stdio.h>
#include <stdlib.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static const int32_t head_dims[] = {64, 128, 80, 1, 96, 256, 40, 112, 8, 192, 72};
static const int32_t groups[] = {4, 1, 3, 8, 2, 5, 7, 12, 6, 16};
static const int32_t block_sizes[] = {16, 5, 32, 1, 64, 8, 2, 128, 4, 256};
/* Around blocks, units, tiles and splits; one that parts of runs fit into. */
static const int32_t windows[] = {65, 9000, 4, 257, 16, 511, 1, 255, 17, 64, 513, 63, 256, 300, 15, 512};

/* Where sharp scores are bent strongly, as models have it, and hardly. */
static const float softcaps[] = {8, 50, 2000};

/* What makes a program: dtypes, view, whether there are windows, the softcap, and for variants with constants also
 * head_dim, group and block size. */
typedef struct combination {
    kvleaf_dtype q, kv, out;
    problem_view view;
    kvleaf_layout layout;
    int32_t head_dim, group, block_size;
    bool windowed;
    float softcap;
} combination;

static const combination fixed_list[] = {
    {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_CPU16, 128, 4, 16, false, 0},
    {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_CPU16, 128, 4, 16, true, 30},
    {KVLEAF_F16, KVLEAF_F16, KVLEAF_F16, PROBLEM_PACKED, KVLEAF_LAYOUT_DIM8, 64, 8, 32, false, 0},
    {KVLEAF_F32, KVLEAF_F16, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_DIM8, 128, 4, 16, true, 0},
    {KVLEAF_F16, KVLEAF_BF16, KVLEAF_F32, PROBLEM_NHD, KVLEAF_LAYOUT_STRIDED, 80, 3, 5, false, 50},
    {KVLEAF_F16, KVLEAF_F16, KVLEAF_F16, PROBLEM_PACKED, KVLEAF_LAYOUT_DIM8, 128, 12, 8, true, 8},
    {KVLEAF_BF16, KVLEAF_BF16, KVLEAF_BF16, PROBLEM_PACKED, KVLEAF_LAYOUT_ROWS, 128, 4, 1, false, 0},
};

static const combination contiguous_list[] = {
    {KVLEAF_BF16, KVLEAF_F32, KVLEAF_BF16, PROBLEM_CONTIGUOUS, KVLEAF_LAYOUT_STRIDED, 72, 7, 16, true, 0},
    {KVLEAF_F16, KVLEAF_F16, KVLEAF_F16, PROBLEM_CONTIGUOUS, KVLEAF_LAYOUT_STRIDED, 8, 3, 16, false, 0},
};

static const combination small_list[] = {
    {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_CPU16, 16, 2, 16, false, 0},
    {KVLEAF_BF16, KVLEAF_BF16, KVLEAF_F32, PROBLEM_NHD, KVLEAF_LAYOUT_STRIDED, 8, 3, 5, true, 8},
    {KVLEAF_F16, KVLEAF_F16, KVLEAF_F16, PROBLEM_PACKED, KVLEAF_LAYOUT_DIM8, 16, 2, 8, false, 0},
};

static const struct {
    problem_view view;
    kvleaf_layout layout;
} views[] = {
    {PROBLEM_NHD, KVLEAF_LAYOUT_STRIDED},        {PROBLEM_HND, KVLEAF_LAYOUT_STRIDED},
    {PROBLEM_PACKED, KVLEAF_LAYOUT_ROWS},        {PROBLEM_PACKED, KVLEAF_LAYOUT_CPU16},
    {PROBLEM_PACKED, KVLEAF_LAYOUT_DIM8},        {PROBLEM_PACKED, KVLEAF_LAYOUT_SWIZZLE8},
    {PROBLEM_CONTIGUOUS, KVLEAF_LAYOUT_STRIDED},
};

kvl_geometry check_geometry(const problem_geometry *g)
{
    kvl_geometry out = {.q_dtype = g->q_dtype,
                        .kv_dtype = g->kv_dtype,
                        .out_dtype = g->out_dtype,
                        .layout = g->view == PROBLEM_PACKED ? g->layout : KVLEAF_LAYOUT_STRIDED,
                        .num_heads = g->num_heads,
                        .num_kv_heads = g->num_kv_heads,
                        .head_dim = g->head_dim,
                        .block_size = g->view == PROBLEM_CONTIGUOUS ? 0 : g->block_size,
                        .window = g->window,
                        .softcap = g->softcap};
    return out;
}

static int count_served(const check_pass *pass, const kvleaf_caps *caps, const problem_geometry *geometry)
{
    kvl_geometry asked = check_geometry(geometry);
    int served = 0;
    for (int i = 0; i < KVL_OPERATIONS; i++)
        served += pass->variants[i] && !pass->variants[i]->refuses(caps, &asked);
    return served;
}

bool check_serves(const check_pass *pass, const kvleaf_caps *caps, const problem_geometry *geometry)
{
    return count_served(pass, caps, geometry) > 0;
}

void check_describe(const problem_geometry *g, char *text, size_t size)
{
    static const char *const names[] = {"NHD", "HND", "packed", "contiguous"};
    char window[24] = "", softcap[32] = "";
    if (g->window)
        snprintf(window, sizeof(window), ", window %d", g->window);
    if (g->softcap > 0)
        snprintf(softcap, sizeof(softcap), ", softcap %g", g->softcap);
    snprintf(text, size, "q %s, K/V %s, out %s, %s, %d/%d heads of %d, block size %d%s%s, scale %g%s",
             kvleaf_dtype_name(g->q_dtype), kvleaf_dtype_name(g->kv_dtype), kvleaf_dtype_name(g->out_dtype),
             g->view == PROBLEM_PACKED ? kvleaf_layout_name(g->layout) : names[g->view], g->num_heads, g->num_kv_heads,
             g->head_dim, g->view == PROBLEM_CONTIGUOUS ? 0 : g->block_size, window, softcap,
             reference_scale(g->softmax_scale, g->head_dim), g->odd ? ", odd strides and offsets" : "");
}

/* The smallest multiple of the layout's unit that is no smaller. */
static int32_t fit_block_size(kvleaf_layout layout, int32_t block_size)
{
    int32_t unit = layout == KVLEAF_LAYOUT_CPU16 ? 16 : 1;
    if (layout == KVLEAF_LAYOUT_DIM8 || layout == KVLEAF_LAYOUT_SWIZZLE8)
        unit = 8;
    return (block_size + unit - 1) / unit * unit;
}

/* Variation n of a combination: what is no constant of the pass's programs changes with n. */
static problem_geometry vary(const combination *base, unsigned fixed, uint64_t n, int32_t largest_dim)
{
    static const int32_t kv_heads[] = {2, 1, 3};
    problem_geometry g = {.q_dtype = base->q, .kv_dtype = base->kv, .out_dtype = base->out, .view = base->view};
    int32_t group = base->group;
    g.layout = base->layout;
    g.head_dim = base->head_dim;
    g.block_size = base->block_size;
    if (!(fixed & KVL_FIX_HEAD_DIM) && n > 0)
        g.head_dim = head_dims[n % COUNT(head_dims)];
    if (!(fixed & KVL_FIX_GROUP) && n > 0)
        group = groups[n * 3 % COUNT(groups)];
    if (!(fixed & KVL_FIX_BLOCK_SIZE) && n > 0)
        g.block_size = block_sizes[n * 7 % COUNT(block_sizes)];
    if (g.head_dim > largest_dim)
        g.head_dim = largest_dim;
    g.block_size = fit_block_size(g.layout, g.block_size);
    g.num_kv_heads = group * g.head_dim > 1024 ? 1 : kv_heads[n % COUNT(kv_heads)];
    g.num_heads = g.num_kv_heads * group;
    if (g.view == PROBLEM_NHD && n % 4 == 1)
        g.view = PROBLEM_HND;
    g.window = base->windowed ? windows[n % COUNT(windows)] : 0;
    g.softcap = base->softcap;
    g.odd = n % 2 == 1;
    g.softmax_scale = n % 4 == 2 ? 0.3f : 0;
    return g;
}

typedef struct shape_list {
    check_shape *shapes;
    int count, capacity;
    uint64_t seed;
} shape_list;

static bool add(shape_list *list, const problem_geometry *geometry)
{
    if (list->count == list->capacity) {
        int capacity = list->capacity ? list->capacity * 2 : 64;
        check_shape *grown = realloc(list->shapes, (size_t)capacity * sizeof(*grown));
        if (!grown)
            return false;
        list->shapes = grown;
        list->capacity = capacity;
    }
    check_shape *shape = &list->shapes[list->count];
    shape->index = list->count++;
    shape->geometry = *geometry;
    shape->seed = problem_hash(list->seed, (uint64_t)shape->index);
    return true;
}

/* The combination, in another packed layout instead of dim8 where more of the pass's variants serve that. */
static combination suit(const combination *row, const check_pass *pass, const kvleaf_caps *caps, int32_t largest_dim)
{
    static const kvleaf_layout others[] = {KVLEAF_LAYOUT_CPU16, KVLEAF_LAYOUT_SWIZZLE8};
    combination best = *row;
    for (int i = 0; i < COUNT(others) && row->layout == KVLEAF_LAYOUT_DIM8; i++) {
        combination other = *row;
        other.layout = others[i];
        problem_geometry now = vary(&best, pass->fixed, 0, largest_dim);
        problem_geometry changed = vary(&other, pass->fixed, 0, largest_dim);
        if (count_served(pass, caps, &changed) > count_served(pass, caps, &now))
            best = other;
    }
    return best;
}

/* `count` shapes of those combinations that the pass serves, divided evenly. */
static bool add_fixed(shape_list *list, const check_pass *pass, const kvleaf_caps *caps, const combination *rows,
                      int num_rows, int count, int32_t largest_dim)
{
    int served = 0, done = 0;
    for (int i = 0; i < num_rows; i++) {
        combination row = suit(&rows[i], pass, caps, largest_dim);
        problem_geometry g = vary(&row, pass->fixed, 0, largest_dim);
        served += check_serves(pass, caps, &g);
    }
    for (int i = 0, at = 0; i < num_rows; i++) {
        combination row = suit(&rows[i], pass, caps, largest_dim);
        problem_geometry g = vary(&row, pass->fixed, 0, largest_dim);
        if (!check_serves(pass, caps, &g))
            continue;
        int until = ++at * count / served;
        for (int k = 0; done < until; done++, k++) {
            g = vary(&row, pass->fixed, k == 0 ? 0 : (uint64_t)(i + k * 3), largest_dim);
            if (!add(list, &g))
                return false;
        }
    }
    return true;
}

static combination draw_combination(uint64_t draw)
{
    combination out;
    int view = (int)(draw % COUNT(views));
    out.view = views[view].view;
    out.layout = views[view].layout;
    draw /= COUNT(views);
    out.q = (kvleaf_dtype)(draw % 3);
    out.kv = (kvleaf_dtype)(draw / 3 % 3);
    out.out = (kvleaf_dtype)(draw / 9 % 3);
    draw /= 27;
    out.head_dim = head_dims[draw % COUNT(head_dims)];
    draw /= COUNT(head_dims);
    out.group = groups[draw % COUNT(groups)];
    draw /= COUNT(groups);
    out.block_size = block_sizes[draw % COUNT(block_sizes)];
    draw /= COUNT(block_sizes);
    out.windowed = draw % 3 == 0;
    draw /= 3;
    out.softcap = draw % 4 == 0 ? softcaps[draw / 4 % COUNT(softcaps)] : 0;
    return out;
}

/* Random combinations, three shapes each, until there are `count` shapes. Gives up where the pass serves next to none.
 */
static bool add_random(shape_list *list, const check_pass *pass, const kvleaf_caps *caps, int count)
{
    for (uint64_t tries = 0; list->count < count && tries < 1000 + 100 * (uint64_t)count; tries++) {
        uint64_t draw = problem_hash(list->seed, tries) >> 8;
        combination base = draw_combination(draw);
        for (uint64_t k = 0; k < 3 && list->count < count; k++) {
            problem_geometry g = vary(&base, pass->fixed, k == 0 ? 0 : draw % 1000 + k, 256);
            if (check_serves(pass, caps, &g) && !add(list, &g))
                return false;
        }
    }
    return true;
}

/* Every triple of dtypes and every view with every head_dim; groups and block sizes go round at coprime steps, so that
 * the pairs of them with a head_dim all come up. */
static bool add_all(shape_list *list, const check_pass *pass, const kvleaf_caps *caps, int count)
{
    int combinations = 27 * COUNT(views);
    for (int i = 0; i < combinations; i++) {
        for (int d = 0; d < COUNT(head_dims) && (count == 0 || list->count < count); d++) {
            combination base = draw_combination((uint64_t)i);
            base.head_dim = head_dims[d];
            base.group = groups[(i + d) % COUNT(groups)];
            base.block_size = block_sizes[(i * 3 + d * 7) % COUNT(block_sizes)];
            base.windowed = (i + d) % 3 == 0;
            base.softcap = (i + d) % 4 == 0 ? softcaps[d % COUNT(softcaps)] : 0;
            problem_geometry g = vary(&base, ~0u, (uint64_t)(i + d), 256);
            if (check_serves(pass, caps, &g) && !add(list, &g))
                return false;
        }
    }
    return true;
}

check_shape *check_shapes(const check_options *options, const check_pass *pass, const kvleaf_caps *caps, int *count)
{
    shape_list list = {.seed = options->seed};
    int listed = options->count && options->count < CHECK_COUNT ? options->count : CHECK_COUNT;
    bool made = add(&list, &(problem_geometry){0}); /* so that an empty list is no null pointer */
    list.count = 0;
    if (options->all) {
        made = made && add_all(&list, pass, caps, options->count);
    } else if (options->small) {
        made = made && add_fixed(&list, pass, caps, small_list, COUNT(small_list),
                                 options->count ? options->count : COUNT(small_list), 16);
    } else {
        made = made && add_fixed(&list, pass, caps, fixed_list, COUNT(fixed_list), listed, 256) &&
               add_fixed(&list, pass, caps, contiguous_list, COUNT(contiguous_list), (listed + 3) / 4, 256) &&
               add_random(&list, pass, caps, options->count);
    }
    if (!made) {
        free(list.shapes);
        return NULL;
    }
    *count = list.count;
    return list.shapes;
}
