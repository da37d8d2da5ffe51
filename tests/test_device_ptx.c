/* SPDX-License-Identifier: Apache-2.0 */
/* The edit of NVIDIA's PTX: what it changes, what it leaves, and what it refuses. Runs without such a GPU. */
#include "device/program.h"
#include "support.h"

static const char ptx[] = ".version 8.4\n"
                          ".target sm_90, texmode_independent\n"
                          ".shared .align 1024 .b8 memory[48000];\n"
                          ".entry kernel(.param .u64 a)\n"
                          ".reqntid 384, 1, 1\n"
                          "{\n"
                          "\t// begin inline asm\n"
                          "\t//KVL-LOCAL 196896;\n"
                          "\t//KVL wgmma.fence.sync.aligned;\n"
                          "\t// end inline asm\n"
                          "\tmov.u32 %r1, memory;\n"
                          "}\n";

static const char edited[] = ".version 8.4\n"
                             ".target sm_90a, texmode_independent\n"
                             ".shared .align 1024 .b8 memory[196896];\n"
                             ".entry kernel(.param .u64 a)\n"
                             ".reqntid 384, 1, 1\n"
                             ".minnctapersm 1\n"
                             "{\n"
                             "\t// begin inline asm\n"
                             "\t//KVL-LOCAL 196896;\n"
                             "\twgmma.fence.sync.aligned;\n"
                             "\t// end inline asm\n"
                             "\tmov.u32 %r1, memory;\n"
                             "}\n";

static void test_edit(void **state)
{
    (void)state;
    kvl_text out = {0};
    assert_true(kvl_ptx_edit(ptx, &out));
    assert_string_equal(out.data, edited);
    kvl_text_free(&out);
}

/* Each misses one thing without which the kernel can't be what it says. */
static void test_refusals(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "",
        "\x7f"
        "ELF",
        ".target sm_90\n.b8 memory[48000];\n",                    /* no size */
        ".target sm_90\n.b8 memory[48000];\n//KVL-LOCAL 0;\n",    /* no size that makes sense */
        ".target sm_90\n.b8 memory[47000];\n//KVL-LOCAL 1000;\n", /* no local array */
        ".target sm_80\n.b8 memory[48000];\n//KVL-LOCAL 1000;\n", /* another target */
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        kvl_text out = {0};
        assert_false(kvl_ptx_edit(texts[i], &out));
        kvl_text_free(&out);
    }
}

static void test_marks(void **state)
{
    (void)state;
    assert_true(kvl_ptx_wanted("asm volatile(\"//KVL-LOCAL %0;\" ::\"n\"(BYTES));"));
    assert_false(kvl_ptx_wanted("__kernel void f(void) {}"));
    assert_true(
        kvl_ptx_serialised("(C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due "
                           "to insufficient register resources for the wgmma pipeline in the function 'k'"));
    assert_true(
        kvl_ptx_serialised("(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due "
                           "to insufficient register resources for the function 'k'"));
    assert_false(kvl_ptx_serialised("(C7519) warpgroup.arrive is injected in around line 1449 by compiler to allow use "
                                    "of registers in GMMA in function 'k'"));
    assert_false(kvl_ptx_serialised(""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_edit),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_marks),
    };
    return cmocka_run_group_tests_name("PTX edit", tests, NULL, NULL);
}
