/* SPDX-License-Identifier: Apache-2.0 */
/* The picture as SVG: above, each sequence's block table in logical order; below, the pool in physical order. */
#include "picture.h"

#include <stdio.h>

enum {
    WIDTH = 1000,
    LEFT = 30,
    TABLE_TOP = 104,
    TABLE_ROW = 34,
    TABLE_LEFT = 372,
    ENTRY_WIDTH = 62,
    ENTRY_HEIGHT = 24,
    COLUMNS = 8, /* blocks a row of the pool */
    SLOT_COLUMNS = 8,
    SLOT_WIDTH = 12,
    SLOT_HEIGHT = 15,
    BLOCK_WIDTH = SLOT_COLUMNS * SLOT_WIDTH,
    BLOCK_HEIGHT = PICTURE_BLOCK_SIZE / SLOT_COLUMNS * SLOT_HEIGHT,
    BLOCK_STEP_X = 119,
    BLOCK_STEP_Y = 62
};

static const char *const colours[PICTURE_SEQS] = {"#4c78a8", "#f58518", "#54a24b", "#e45756",
                                                  "#9d6fa5", "#3a9d98", "#c9a227", "#8c6d57"};

/* One slot in the colours of its holders, as bands. */
static void draw_slot(FILE *file, int x, int y, const int *holders, int count)
{
    for (int i = 0; i < count; i++) {
        int top = SLOT_HEIGHT * i / count, bottom = SLOT_HEIGHT * (i + 1) / count;
        fprintf(file, "<rect x='%d' y='%d' width='%d' height='%d' fill='%s'/>\n", x, y + top, SLOT_WIDTH - 1,
                bottom - top - (i == count - 1), colours[holders[i]]);
    }
}

static void draw_block(FILE *file, const picture *p, int32_t block, int x, int y)
{
    int holders[PICTURE_SEQS], count = picture_holders(p, block, holders);
    int32_t filled = picture_filled(p, block);

    fprintf(file, "<text x='%d' y='%d' class='id'>%d</text>\n", x, y - 5, block);
    if (count > 1)
        fprintf(file, "<text x='%d' y='%d' class='shared'>shared by %d</text>\n", x + BLOCK_WIDTH, y - 5, count);
    fprintf(file, "<rect x='%d' y='%d' width='%d' height='%d' rx='3' class='%s'/>\n", x - 3, y - 3, BLOCK_WIDTH + 5,
            BLOCK_HEIGHT + 5, count ? "used" : "free");
    for (int slot = 0; slot < PICTURE_BLOCK_SIZE && count; slot++) {
        int slot_x = x + slot % SLOT_COLUMNS * SLOT_WIDTH, slot_y = y + slot / SLOT_COLUMNS * SLOT_HEIGHT;
        if (slot < filled)
            draw_slot(file, slot_x, slot_y, holders, count);
        else
            fprintf(file, "<rect x='%d' y='%d' width='%d' height='%d' class='unused'/>\n", slot_x, slot_y,
                    SLOT_WIDTH - 1, SLOT_HEIGHT - 1);
    }
}

static void draw_table(FILE *file, const picture *p, int s, int y)
{
    const picture_seq *seq = &p->seqs[s];

    fprintf(file, "<rect x='%d' y='%d' width='16' height='16' rx='3' fill='%s'/>\n", LEFT, y + 4, colours[s]);
    fprintf(file, "<text x='%d' y='%d'>%s</text>\n", LEFT + 26, y + 17, seq->label);
    fprintf(file, "<text x='%d' y='%d' class='right'>%d tokens</text>\n", TABLE_LEFT - 16, y + 17, seq->length);
    for (int32_t i = 0; i < seq->num_blocks; i++) {
        int x = TABLE_LEFT + i * (ENTRY_WIDTH + 4), holders[PICTURE_SEQS];
        int32_t tokens = seq->length - i * PICTURE_BLOCK_SIZE;
        int filled = tokens >= PICTURE_BLOCK_SIZE ? ENTRY_WIDTH : ENTRY_WIDTH * tokens / PICTURE_BLOCK_SIZE;

        fprintf(file, "<rect x='%d' y='%d' width='%d' height='%d' class='unused'/>\n", x, y, ENTRY_WIDTH, ENTRY_HEIGHT);
        fprintf(file, "<rect x='%d' y='%d' width='%d' height='%d' fill='%s'/>\n", x, y, filled, ENTRY_HEIGHT,
                colours[s]);
        fprintf(file, "<rect x='%d' y='%d' width='%d' height='%d' class='%s'/>\n", x, y, ENTRY_WIDTH, ENTRY_HEIGHT,
                picture_holders(p, seq->table[i], holders) > 1 ? "frame-shared" : "frame");
        fprintf(file, "<text x='%d' y='%d' class='entry'>%d</text>\n", x + ENTRY_WIDTH / 2, y + 17, seq->table[i]);
    }
}

static void draw_legend(FILE *file, int y)
{
    fprintf(file, "<rect x='%d' y='%d' width='14' height='13' fill='%s'/>\n", LEFT, y, colours[0]);
    fprintf(file, "<text x='%d' y='%d'>a slot with a token, in its sequence's colour</text>\n", LEFT + 22, y + 12);
    fprintf(file, "<rect x='%d' y='%d' width='14' height='13' class='unused'/>\n", LEFT + 345, y);
    fprintf(file, "<text x='%d' y='%d'>unused slot of a block in use</text>\n", LEFT + 367, y + 12);
    for (int i = 0; i < 3; i++)
        fprintf(file, "<rect x='%d' y='%d' width='14' height='%d' fill='%s'/>\n", LEFT + 588, y + i * 4, 5,
                colours[2 + i]);
    fprintf(file, "<text x='%d' y='%d'>shared: stored once for several</text>\n", LEFT + 610, y + 12);
    fprintf(file, "<rect x='%d' y='%d' width='14' height='13' rx='2' class='free'/>\n", LEFT + 848, y);
    fprintf(file, "<text x='%d' y='%d'>free block</text>\n", LEFT + 870, y + 12);
}

static void draw_head(FILE *file, int height)
{
    fprintf(file, "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' viewBox='0 0 %d %d'>\n", WIDTH,
            height, WIDTH, height);
    fprintf(file, "<style>\n"
                  "text { font: 14px sans-serif; fill: #222 }\n"
                  ".title { font: bold 21px sans-serif }\n"
                  ".section { font: bold 15px sans-serif }\n"
                  ".small { font: 13px sans-serif; fill: #555 }\n"
                  ".id { font: 11px sans-serif; fill: #555 }\n"
                  ".shared { font: bold 10px sans-serif; fill: #222; text-anchor: end }\n"
                  ".right { text-anchor: end; fill: #555 }\n"
                  ".entry { font: bold 13px sans-serif; text-anchor: middle }\n"
                  ".unused { fill: #fff; stroke: #c9c9c9; stroke-width: 1 }\n"
                  ".used { fill: #ececec; stroke: #8a8a8a }\n"
                  ".free { fill: #fafafa; stroke: #cfcfcf; stroke-dasharray: 3 3 }\n"
                  ".frame { fill: none; stroke: #8a8a8a }\n"
                  ".frame-shared { fill: none; stroke: #222; stroke-width: 2.5 }\n"
                  "</style>\n");
    fprintf(file, "<rect width='%d' height='%d' fill='#fff'/>\n", WIDTH, height);
}

bool picture_write_svg(const picture *p, const char *path)
{
    int pool_top = TABLE_TOP + p->num_seqs * TABLE_ROW + 56;
    int legend_top = pool_top + PICTURE_BLOCKS / COLUMNS * BLOCK_STEP_Y + 4, height = legend_top + 58;
    FILE *file = fopen(path, "w");

    if (!file)
        return false;
    draw_head(file, height);
    fprintf(file, "<text x='%d' y='40' class='title'>Paged K/V cache: %d sequences in one pool of %d blocks</text>\n",
            LEFT, p->num_seqs, PICTURE_BLOCKS);
    fprintf(file,
            "<text x='%d' y='62' class='small'>%d tokens a block; a block table says where a sequence's next tokens "
            "lie</text>\n",
            LEFT, PICTURE_BLOCK_SIZE);
    fprintf(file, "<text x='%d' y='%d' class='section'>Block tables: logical order (thick frame: shared)</text>\n",
            LEFT, TABLE_TOP - 12);
    for (int s = 0; s < p->num_seqs; s++)
        draw_table(file, p, s, TABLE_TOP + s * TABLE_ROW);
    fprintf(file, "<text x='%d' y='%d' class='section'>The pool: physical place</text>\n", LEFT, pool_top - 30);
    for (int32_t block = 0; block < PICTURE_BLOCKS; block++)
        draw_block(file, p, block, LEFT + block % COLUMNS * BLOCK_STEP_X + 3,
                   pool_top + block / COLUMNS * BLOCK_STEP_Y);
    draw_legend(file, legend_top);
    fprintf(
        file,
        "<text x='%d' y='%d' class='small'>%d blocks in use (%d without sharing), %d free. Unused slots: %lld here, "
        "%lld if each sequence had %d reserved.</text>\n</svg>\n",
        LEFT, legend_top + 38, p->stats.used, picture_unshared(p), p->stats.free, (long long)p->stats.slots_wasted,
        (long long)p->num_seqs * p->reserved - (long long)p->stats.tokens, p->reserved);
    return fclose(file) == 0;
}
