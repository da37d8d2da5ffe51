/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the block map for people: it says what is so, in one line a thing, at any size. */
#include "blocks_support.h"
#include "ledger.h"

static char *describe(const kvleaf_blocks *blocks, kvleaf_format format)
{
    size_t size = 0, again = 0;
    assert_status(kvleaf_blocks_describe(blocks, format, NULL, 0, &size), KVLEAF_TOO_SMALL);
    char *text = malloc(size);
    assert_non_null(text);
    assert_ok(kvleaf_blocks_describe(blocks, format, text, size, &again));
    assert_int_equal(again, size);
    assert_int_equal(strlen(text) + 1, size);
    return text;
}

static int count_of(const char *text, const char *part)
{
    int count = 0;
    for (const char *at = strstr(text, part); at; at = strstr(at + 1, part))
        count++;
    return count;
}

/* A parent, a child that shares its first block and has a copy pending, a withheld block. */
static kvleaf_blocks *scene(kvleaf_seq *parent)
{
    static const int32_t order[] = {0, 1, 2, 3, 4, 6, 7};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(
        kvleaf_blocks_params(.num_blocks = 8, .block_size = 4, .free_order = order, .free_count = 7), &blocks));
    assert_ok(kvleaf_blocks_seq_create(
        blocks, &(kvleaf_seq_params){.struct_size = sizeof(kvleaf_seq_params), .user = 77}, parent));
    assert_ok(extend(blocks, *parent, 6));
    compute(blocks, *parent);
    kvleaf_seq child = fork_seq(blocks, *parent, 6);
    assert_ok(extend(blocks, child, 7));
    return blocks;
}

static void test_text(void **state)
{
    (void)state;
    kvleaf_seq parent = 0;
    kvleaf_blocks *blocks = scene(&parent);
    char *text = describe(blocks, KVLEAF_FORMAT_TEXT);
    assert_string_equal(text,
                        "group 0: 8 blocks of 4 tokens: 6 used (1 shared, 0 pinned), 0 cached, 2 free; 5 slots wasted\n"
                        "       0  2ABBB-..\n"
                        "          . free   c cached   A-Z its sequence   2-9 + how many share it   p pinned   "
                        "- withheld   * as above\n"
                        "A sequence 0: 6 tokens, 6 committed, user 77\n"
                        "          0-1\n"
                        "B sequence 1: 13 tokens, 6 committed, user 77\n"
                        "          0 2-4\n");
    free(text);
    /* The source of the pending copy outlives its sequence. */
    assert_ok(kvleaf_blocks_seq_truncate(blocks, parent, 4));
    text = describe(blocks, KVLEAF_FORMAT_TEXT);
    assert_non_null(strstr(text, "(1 shared, 1 pinned)"));
    assert_non_null(strstr(text, "\n       0  2pBBB-..\n"));
    assert_non_null(strstr(text, "\nA sequence 0: 4 tokens, 4 committed, user 77\n          0\n"));
    free(text);
    kvleaf_blocks_destroy(&blocks);
}

static void test_more_than_nine_share(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(4, 4);
    kvleaf_seq seq = make_seq(blocks, 4);
    for (int i = 0; i < 8; i++)
        fork_seq(blocks, seq, 4);
    char *text = describe(blocks, KVLEAF_FORMAT_TEXT);
    assert_non_null(strstr(text, "\n       0  9...\n"));
    free(text);
    fork_seq(blocks, seq, 4);
    text = describe(blocks, KVLEAF_FORMAT_TEXT);
    assert_non_null(strstr(text, "\n       0  +...\n"));
    free(text);
    text = describe(blocks, KVLEAF_FORMAT_SVG);
    assert_int_equal(count_of(text, "shared by 10"), 1);
    free(text);
    kvleaf_blocks_destroy(&blocks);
}

static void test_groups(void **state)
{
    (void)state;
    const kvleaf_block_group groups[] = {{.num_blocks = 3}, {.num_blocks = 5}};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = 4, .groups = groups, .num_groups = 2), &blocks));
    make_seq(blocks, 9);
    char *text = describe(blocks, KVLEAF_FORMAT_TEXT);
    assert_non_null(strstr(text, "group 0: 3 blocks of 4 tokens: 3 used"));
    assert_non_null(strstr(text, "group 1: 5 blocks of 4 tokens: 3 used"));
    assert_non_null(strstr(text, "\n       0  AAA\n"));
    assert_non_null(strstr(text, "\n       0  AAA..\n"));
    assert_non_null(strstr(text, "\n          0-2\n          0-2\n"));
    free(text);
    text = describe(blocks, KVLEAF_FORMAT_SVG);
    assert_int_equal(count_of(text, "physical place"), 2);
    free(text);
    kvleaf_blocks_destroy(&blocks);
}

/* A prompt that is cached, a sequence whose first blocks left the window, and one in host memory. */
static void test_cached_gone_and_swapped(void **state)
{
    (void)state;
    const kvleaf_block_group groups[] = {{.num_blocks = 12, .swap_blocks = 5},
                                         {.num_blocks = 12, .swap_blocks = 4, .window = 5}};
    int32_t ids[16];
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = 0;
    kvleaf_blocks *blocks = NULL;
    for (int32_t i = 0; i < 16; i++)
        ids[i] = i;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = 4, .groups = groups, .num_groups = 2), &blocks));
    kvleaf_seq cached = make_prompt(blocks, NULL, ids, 5, NULL), gone = make_seq(blocks, 15), out = make_seq(blocks, 6);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &cached));
    assert_ok(kvleaf_blocks_swap_out(blocks, out, &copies, &count));
    assert_ok(kvleaf_blocks_swap_end(blocks, out, true));
    char *text = describe(blocks, KVLEAF_FORMAT_TEXT);
    assert_non_null(
        strstr(text, "1 cached, 7 free; 1 slots wasted; 2 of 5 host blocks used\n       0  c.BBBB.... ..\n"));
    assert_non_null(
        strstr(text, "1 cached, 9 free; 1 slots wasted; 2 of 4 host blocks used\n       0  c...BB.... ..\n"));
    assert_non_null(
        strstr(text, "\nB sequence 1: 15 tokens, 15 committed, user 0\n          2-5\n          (2 gone) 4-5\n"));
    assert_non_null(strstr(text, "\nC sequence 2: 6 tokens, 6 committed, user 0, swapped out to host blocks\n"
                                 "          0-1\n          0-1\n"));
    free(text);
    text = describe(blocks, KVLEAF_FORMAT_SVG);
    assert_int_equal(count_of(text, "class='host'"), 2 * 2 + 1);
    assert_int_equal(count_of(text, "class='cached'"), 2 + 1);
    free(text);
    assert_int_equal(info_of(blocks, gone).blocks_unique, 6);
    kvleaf_blocks_destroy(&blocks);
}

/* Every line short, rows that say the same once, and the whole of it a page or two. */
static void test_ten_thousand_blocks(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(10000, 16);
    kvleaf_seq seqs[20];
    for (int i = 0; i < 20; i++)
        seqs[i] = make_seq(blocks, 16);
    for (int round = 0; round < 200; round++) { /* tables of every 20th block */
        for (int i = 0; i < 20; i++)
            assert_ok(extend(blocks, seqs[i], 16));
    }
    char *text = describe(blocks, KVLEAF_FORMAT_TEXT);
    int lines = 0;
    for (const char *at = text, *end; (end = strchr(at, '\n')); at = end + 1, lines++)
        assert_true(end - at <= 120);
    assert_in_range(lines, 20, 300);
    assert_int_equal(count_of(text, "\n       *\n"), 2);
    assert_non_null(strstr(text, "\n    4100  .")); /* the first row without a used block */
    assert_null(strstr(text, "\n    4200 "));
    assert_non_null(strstr(text, "\n    9900  ."));
    free(text);
    text = describe(blocks, KVLEAF_FORMAT_SVG);
    assert_in_range(strlen(text), 10000, 2000000);
    free(text);
    kvleaf_blocks_destroy(&blocks);
}

/* Tags that open are closed in order, attributes are quoted, and no text has a bare < or &. */
static void check_xml(const char *text)
{
    char open[8][16];
    int depth = 0, elements = 0;
    for (const char *at = text; *at;) {
        assert_true(*at != '&' && *at != '>');
        if (*at != '<') {
            assert_true(depth > 0 || *at == '\n');
            at++;
            continue;
        }
        const char *end = strchr(at, '>');
        assert_non_null(end);
        int quotes = 0;
        for (const char *inside = at + 1; inside < end; inside++) {
            assert_true(*inside != '<' && *inside != '&');
            quotes += *inside == '\'';
        }
        assert_int_equal(quotes % 2, 0);
        if (at[1] == '/') {
            assert_true(depth > 0);
            depth--;
            assert_int_equal(strncmp(open[depth], at + 2, (size_t)(end - at - 2)), 0);
        } else if (end[-1] != '/') {
            assert_in_range(depth, 0, 7);
            size_t length = strcspn(at + 1, " >");
            assert_in_range(length, 1, 15);
            memcpy(open[depth], at + 1, length);
            open[depth++][length] = 0;
        }
        elements++;
        at = end + 1;
    }
    assert_int_equal(depth, 0);
    assert_true(elements > 10);
}

static void test_svg(void **state)
{
    (void)state;
    static const int32_t sizes[] = {1, 8, 64, 65, 600, 601, 3000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        kvleaf_blocks *blocks = make_blocks(sizes[i], 16);
        kvleaf_seq seq = make_seq(blocks, 8 * (int64_t)sizes[i]);
        if (sizes[i] > 1)
            assert_ok(extend(blocks, fork_seq(blocks, seq, 8 * (int64_t)sizes[i]), 5));
        char *text = describe(blocks, KVLEAF_FORMAT_SVG);
        assert_int_equal(strncmp(text, "<svg xmlns='http://www.w3.org/2000/svg' width='1000' ", 53), 0);
        check_xml(text);
        free(text);
        kvleaf_blocks_destroy(&blocks);
    }
    kvleaf_seq parent = 0;
    kvleaf_blocks *blocks = scene(&parent);
    char *text = describe(blocks, KVLEAF_FORMAT_SVG);
    check_xml(text);
    assert_int_equal(count_of(text, ">shared by 2<"), 1);
    assert_int_equal(count_of(text, "class='withheld'"), 2); /* the block, and the legend */
    assert_int_equal(count_of(text, ">6 tokens<"), 1);
    assert_int_equal(count_of(text, ">13 tokens<"), 1);
    free(text);
    kvleaf_blocks_destroy(&blocks);
}

static void test_refusals(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(4, 4);
    make_seq(blocks, 5);
    for (int format = KVLEAF_FORMAT_TEXT; format <= KVLEAF_FORMAT_SVG; format++) {
        size_t size = 0, needed = 0;
        char *text = describe(blocks, format);
        needed = strlen(text) + 1;
        memset(text, 'x', needed);
        assert_status(kvleaf_blocks_describe(blocks, format, text, needed - 1, &size), KVLEAF_TOO_SMALL);
        assert_int_equal(size, needed);
        assert_int_equal(kvleaf_last_error()->value, needed - 1);
        assert_int_equal(kvleaf_last_error()->limit, needed);
        for (size_t i = 0; i < needed; i++)
            assert_int_equal(text[i], 'x');
        free(text);
    }
    size_t size = 0;
    char room[4096];
    assert_status(kvleaf_blocks_describe(NULL, KVLEAF_FORMAT_TEXT, room, sizeof room, &size), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_describe(blocks, KVLEAF_FORMAT_TEXT, room, sizeof room, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_describe(blocks, KVLEAF_FORMAT_TEXT, NULL, 1, &size), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_describe(blocks, (kvleaf_format)2, room, sizeof room, &size), KVLEAF_INVALID);
    assert_string_equal(kvleaf_last_error()->field, "format");
    kvleaf_blocks_destroy(&blocks);
}

static void test_no_memory(void **state)
{
    (void)state;
    const kvleaf_block_group groups[] = {{.num_blocks = 3}, {.num_blocks = 5}};
    ledger l = {0};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(
        kvleaf_blocks_params(.block_size = 4, .groups = groups, .num_groups = 2,
                             .allocator = {.allocate = counted_allocate, .release = counted_release, .user = &l}),
        &blocks));
    int64_t live = l.live, refused = 0;
    size_t size = 0;
    char room[8192];
    for (l.fail_at = 1;; l.fail_at++) {
        l.calls = 0;
        kvleaf_status status = kvleaf_blocks_describe(blocks, KVLEAF_FORMAT_SVG, room, sizeof room, &size);
        assert_int_equal(l.live, live);
        if (!status)
            break;
        assert_int_equal(status, KVLEAF_NO_MEMORY);
        refused++;
    }
    assert_int_equal(refused, 2);
    l.fail_at = 0;
    kvleaf_blocks_destroy(&blocks);
    assert_int_equal(l.live, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_more_than_nine_share),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_cached_gone_and_swapped),
        cmocka_unit_test(test_ten_thousand_blocks),
        cmocka_unit_test(test_svg),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
