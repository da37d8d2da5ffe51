/* SPDX-License-Identifier: Apache-2.0 */
/* The block map as SVG: above, each sequence's tables in logical order; below, the blocks of each group in physical
 * order. A sequence has a colour; a shared block has a band of each of its holders'. */
#include "blocks/describe.h"

enum {
    WIDTH = 1000,
    LEFT = 30,
    MAP_LEFT = 70,
    TABLE_LEFT = 330,
    TOP = 76,
    HEADING = 34,
    GAP = 30,
    LABEL_HEIGHT = 24,
    COLOURS = 8
};

static const char *const colours[COLOURS] = {"#4c78a8", "#f58518", "#54a24b", "#e45756",
                                             "#9d6fa5", "#3a9d98", "#c9a227", "#8c6d57"};

/* How a block is drawn: the more blocks, the smaller. */
typedef struct cells {
    int width, height;
    int step_x, step_y;
    int columns;
    int font;    /* of the id in the cell; 0 = none */
    bool detail; /* the id stands above the cell, with how many share it, and slots are told apart */
} cells;

static const cells map_large = {104, 28, 113, 50, 8, 12, true};
static const cells map_medium = {41, 18, 45, 23, 20, 11, false};
static const cells map_small = {8, 8, 9, 9, 100, 0, false};
static const cells table_large = {60, 24, 64, 32, 10, 13, false};
static const cells table_medium = {39, 18, 43, 23, 15, 11, false};
static const cells table_small = {8, 8, 9, 9, 70, 0, false};

enum { SMALL_LABELS = 5, LARGE_BLOCKS = 64, MEDIUM_BLOCKS = 600, LARGE_ENTRIES = 10, MEDIUM_ENTRIES = 45 };

static const cells *map_cells(int32_t num_blocks)
{
    return num_blocks <= LARGE_BLOCKS ? &map_large : num_blocks <= MEDIUM_BLOCKS ? &map_medium : &map_small;
}

static const cells *table_cells(const kvleaf_blocks *blocks)
{
    int32_t most = 0;
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        const kvl_sequence *sequence = &blocks->sequences[i];
        if (sequence->next_unused == KVL_UNLISTED && sequence->count > most)
            most = sequence->count;
    }
    return most <= LARGE_ENTRIES ? &table_large : most <= MEDIUM_ENTRIES ? &table_medium : &table_small;
}

static int rows_of(int64_t count, const cells *c)
{
    return (int)kvl_ceil_div(count, c->columns);
}

static void put_rect(kvl_picture *p, int x, int y, int width, int height, const char *class)
{
    kvl_picture_put(p, "<rect x='%d' y='%d' width='%d' height='%d' class='%s'/>\n", x, y, width, height, class);
}

static const char *class_of(kvl_block_state state)
{
    static const char *const classes[] = {
        [KVL_BLOCK_FREE] = "free",     [KVL_BLOCK_CACHED] = "cached",     [KVL_BLOCK_USED] = "used",
        [KVL_BLOCK_PINNED] = "pinned", [KVL_BLOCK_WITHHELD] = "withheld", [KVL_BLOCK_HOST] = "host",
    };
    return classes[state];
}

/* The filled part of one block, or of `run` blocks side by side, in the colours of its holders. */
static void put_bands(kvl_picture *p, const kvl_look *look, const cells *c, int x, int y, int width, int32_t tokens)
{
    int filled = (int)((int64_t)width * tokens / p->blocks->block_size);
    int bands = look->references < KVL_LOOK_HOLDERS ? look->references : KVL_LOOK_HOLDERS;
    for (int i = 0; i < bands; i++) {
        int top = c->height * i / bands, bottom = c->height * (i + 1) / bands;
        kvl_picture_put(p, "<rect x='%d' y='%d' width='%d' height='%d' fill='%s'/>\n", x, y + top,
                        filled > 0 ? filled : 1, bottom - top, colours[look->holders[i] % COLOURS]);
    }
}

static void put_slots(kvl_picture *p, const cells *c, int x, int y)
{
    int32_t block_size = p->blocks->block_size;
    if (!c->detail || c->width / block_size < 3)
        return;
    kvl_picture_put(p, "<path class='slots' d='");
    for (int32_t slot = 1; slot < block_size; slot++)
        kvl_picture_put(p, "M%d %dv%d", x + (int)((int64_t)c->width * slot / block_size), y, c->height);
    kvl_picture_put(p, "'/>\n");
}

static void put_id(kvl_picture *p, const kvl_look *look, const cells *c, int x, int y, int32_t id)
{
    if (!c->detail) {
        kvl_picture_put(p, "<text x='%d' y='%d' class='id%s' font-size='%d'>%d</text>\n", x + c->width / 2,
                        y + c->height / 2 + c->font * 3 / 8, look->state == KVL_BLOCK_FREE ? " dim" : "", c->font, id);
        return;
    }
    kvl_picture_put(p, "<text x='%d' y='%d' class='above'>%d</text>\n", x, y - 4, id);
    if (look->references > 1)
        kvl_picture_put(p, "<text x='%d' y='%d' class='above end'>shared by %d</text>\n", x + c->width, y - 4,
                        look->references);
}

/* `run` blocks that look alike; `tokens` as the place shows them: the fullest sequence's, or a table's own. */
static void put_blocks(kvl_picture *p, const kvl_look *look, const cells *c, int x, int y, int run, int32_t tokens,
                       int32_t id)
{
    int width = (run - 1) * c->step_x + c->width;
    put_rect(p, x, y, width, c->height, class_of(look->state));
    if (look->state == KVL_BLOCK_USED) {
        put_bands(p, look, c, x, y, width, tokens);
        put_slots(p, c, x, y);
        if (c->font)
            put_rect(p, x, y, width, c->height, look->references > 1 ? "frame shared" : "frame");
    }
    if (c->font)
        put_id(p, look, c, x, y, id);
}

/* Whether blocks side by side can be drawn as one. */
static bool alike(const kvl_picture *p, const kvl_look *a, const kvl_look *b)
{
    if (a->state != b->state || a->references != b->references)
        return false;
    if (a->state != KVL_BLOCK_USED)
        return true;
    for (int i = 0; i < a->references && i < KVL_LOOK_HOLDERS; i++) {
        if (a->holders[i] != b->holders[i])
            return false;
    }
    return a->tokens == p->blocks->block_size && b->tokens == a->tokens;
}

static void put_map(kvl_picture *p, int32_t group, int top)
{
    int32_t num_blocks = p->blocks->groups[group].num_blocks;
    const cells *c = map_cells(num_blocks);
    const kvl_look *looks = p->looks[group];
    int labelled = c->font ? 1 : SMALL_LABELS; /* every so many rows */
    for (int32_t first = 0, run; first < num_blocks; first += run) {
        int32_t column = first % c->columns, most = c->font ? 1 : c->columns - column;
        for (run = 1; run < most && run < num_blocks - first && alike(p, &looks[first], &looks[first + run]);)
            run++;
        int y = top + first / c->columns * c->step_y;
        if (column == 0 && first / c->columns % labelled == 0)
            kvl_picture_put(p, "<text x='%d' y='%d' class='row'>%d</text>\n", MAP_LEFT - 10, y + c->height / 2 + 4,
                            first);
        put_blocks(p, &looks[first], c, MAP_LEFT + column * c->step_x, y, (int)run, looks[first].tokens, first);
    }
}

/* An entry of a sequence's table in a group. */
static void put_entry(kvl_picture *p, const cells *c, const kvl_sequence *sequence, int32_t group, int32_t i, int top)
{
    static const kvl_look in_host_memory = {.state = KVL_BLOCK_HOST};
    int32_t block_size = p->blocks->block_size, block = kvl_sequence_table(sequence, group)[i];
    int64_t behind = sequence->extended - (int64_t)i * block_size;
    int x = TABLE_LEFT + i % c->columns * c->step_x, y = top + i / c->columns * c->step_y;
    if (block == KVLEAF_NO_BLOCK)
        put_rect(p, x, y, c->width, c->height, "free");
    else
        put_blocks(p, sequence->residence == KVL_SWAPPED ? &in_host_memory : &p->looks[group][block], c, x, y, 1,
                   behind < block_size ? (int32_t)behind : block_size, block);
}

/* Returns where the next thing goes. */
static int put_sequence(kvl_picture *p, const cells *c, const kvl_sequence *sequence, int y)
{
    const kvleaf_blocks *blocks = p->blocks;
    int slot = kvl_sequence_slot(blocks, sequence), middle = y + c->height / 2 + 5;
    int row_height = c->step_y > LABEL_HEIGHT ? c->step_y : LABEL_HEIGHT;
    kvl_picture_put(p, "<rect x='%d' y='%d' width='16' height='16' rx='3' fill='%s'/>\n", LEFT, middle - 13,
                    colours[slot % COLOURS]);
    kvl_picture_put(p, "<text x='%d' y='%d'>sequence %d</text>\n", LEFT + 24, middle, slot);
    kvl_picture_put(p, "<text x='%d' y='%d' class='row'>%lld tokens</text>\n", TABLE_LEFT - 14, middle,
                    (long long)sequence->extended);
    for (int32_t group = 0; group < blocks->num_groups; group++) {
        for (int32_t i = 0; i < sequence->count; i++)
            put_entry(p, c, sequence, group, i, y);
        int rows = rows_of(sequence->count, c);
        y += rows > 1 ? (rows - 1) * c->step_y + row_height : row_height;
    }
    return y;
}

static int put_group(kvl_picture *p, int32_t group, int y)
{
    const kvleaf_blocks_stats *stats = &p->stats[group];
    kvl_picture_put(p,
                    "<text x='%d' y='%d'><tspan class='section'>Group %d: physical place.</tspan> %d blocks: %d used "
                    "(%d shared, %d pinned), %d cached, %d free; %lld slots wasted</text>\n",
                    LEFT, y, group, stats->total, stats->used, p->shared[group], stats->pinned, stats->cached,
                    stats->free, (long long)stats->slots_wasted);
    const cells *c = map_cells(stats->total);
    y += c->detail ? HEADING : HEADING - 18;
    put_map(p, group, y);
    return y + rows_of(stats->total, c) * c->step_y + GAP;
}

static int put_legend(kvl_picture *p, int y)
{
    static const struct {
        const char *class, *text;
        int width;
    } parts[] = {
        {"used", "unused slots of a used block", 233},
        {"frame shared", "shared: once for several", 196},
        {"cached", "cached", 85},
        {"free", "free", 70},
        {"pinned", "pinned", 85},
        {"withheld", "withheld", 95},
        {"host", "in host memory", 100},
    };
    int x = LEFT;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        put_rect(p, x, y, 16, 16, parts[i].class);
        kvl_picture_put(p, "<text x='%d' y='%d'>%s</text>\n", x + 23, y + 13, parts[i].text);
        x += parts[i].width;
    }
    return y + 16;
}

static void put_styles(kvl_picture *p)
{
    kvl_picture_put(p, "<style>\n"
                       ".ground { fill: #fff }\n"
                       "text { font: 14px sans-serif; fill: #222 }\n"
                       ".title { font: bold 21px sans-serif }\n"
                       ".section { font-weight: bold }\n"
                       ".row { font-size: 12px; fill: #555; text-anchor: end }\n"
                       ".id { font-family: sans-serif; font-weight: bold; text-anchor: middle }\n"
                       ".dim { fill: #999 }\n"
                       ".above { font-size: 11px; fill: #444 } .end { text-anchor: end; font-weight: bold }\n"
                       ".free { fill: #fafafa; stroke: #cfcfcf; stroke-dasharray: 3 3 }\n"
                       ".cached { fill: #d5e3ef; stroke: #8fa9bf }\n"
                       ".used { fill: #fff; stroke: #b0b0b0 }\n"
                       ".pinned { fill: #f4e3a1; stroke: #b59a2b }\n"
                       ".withheld { fill: #9a9a9a; stroke: #7a7a7a }\n"
                       ".host { fill: #efe6f4; stroke: #8a6fa5; stroke-dasharray: 5 2 }\n"
                       ".frame { fill: none; stroke: #8a8a8a }\n"
                       ".shared { stroke: #222; stroke-width: 2.5 }\n"
                       ".slots { stroke: #fff; fill: none }\n"
                       "</style>\n");
}

/* Everything, below the root element; returns its height. */
static int put_all(kvl_picture *p)
{
    const kvleaf_blocks *blocks = p->blocks;
    const cells *c = table_cells(blocks);
    int y = TOP;
    kvl_picture_put(p, "<text x='%d' y='40' class='title'>Paged K/V cache: %d sequences, %d tokens a block</text>\n",
                    LEFT, blocks->live, blocks->block_size);
    kvl_picture_put(p, "<text x='%d' y='%d' class='section'>Block tables: logical order</text>\n", LEFT, y);
    y += HEADING - 18;
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        if (blocks->sequences[i].next_unused == KVL_UNLISTED)
            y = put_sequence(p, c, &blocks->sequences[i], y);
    }
    y += GAP;
    for (int32_t group = 0; group < blocks->num_groups; group++)
        y = put_group(p, group, y);
    return put_legend(p, y - GAP / 2) + GAP / 2;
}

void kvl_picture_svg(kvl_picture *p)
{
    /* The height stands in front of what decides it. */
    kvl_picture measured = *p;
    measured.capacity = 0;
    int height = put_all(&measured);
    kvl_picture_put(p, "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' viewBox='0 0 %d %d'>\n", WIDTH,
                    height, WIDTH, height);
    put_styles(p);
    put_rect(p, 0, 0, WIDTH, height, "ground");
    put_all(p);
    kvl_picture_put(p, "</svg>\n");
}
