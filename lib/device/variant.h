/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_VARIANT_H
#define KVL_VARIANT_H

/* Kernel variants: one table a family, generic first, better ones after it. The last that serves the geometry on this
 * device, builds, and whose kernels can be made is taken; the query and the dispatch read the same table. */

#include "device/device.h"

/* What a program is built for. */
typedef struct kvl_geometry {
    kvleaf_dtype q_dtype, kv_dtype, out_dtype;
    kvleaf_layout layout; /* any but AUTO */
    int32_t num_heads, num_kv_heads;
    int32_t head_dim;
    int32_t block_size; /* 0 = contiguous K/V */
    int32_t window;     /* tokens a row sees, its own included; 0 = all */
    float softcap;      /* of the scores; 0 = none */
    bool device_tables; /* block ids and lengths unknown to the host */
} kvl_geometry;

/* Which of the geometry become constants of the program: -DHEAD_DIM, -DGROUP, -DBLOCK_SIZE. */
enum { KVL_FIX_HEAD_DIM = 1, KVL_FIX_GROUP = 2, KVL_FIX_BLOCK_SIZE = 4 };

#define KVL_VARIANT_KERNELS 4

typedef struct kvl_variant {
    const char *family;                       /* "decode" */
    const char *name;                         /* "portable" */
    const char *file;                         /* below cl_kernels/ */
    const char *kernels[KVL_VARIANT_KERNELS]; /* entry points */
    /* NULL where the variant serves the geometry on the device, else a sentence saying why not. */
    const char *(*refuses)(const kvleaf_caps *caps, const kvl_geometry *geometry);
    unsigned fixed;         /* KVL_FIX_... */
    bool windows;           /* it computes scores: a window is a matter of the program, -DWINDOWED=1 whatever it is, and
                               so is a softcap, -DSOFTCAP_BITS */
    const char *options;    /* further options, or NULL */
    int32_t work_group;     /* work-items a work-group: halved until it is within the device's and the
                               kernels' limits, then given as -DWORK_GROUP */
    int32_t min_work_group; /* below this the variant does not serve; 0 = 1 */
    bool persistent;      /* a work-group a compute unit, taking items from a counter; prefill: in claims that keep the
                             tiles of a sequence and KV head together */
    bool queued;          /* the same for items taken one by one, the heaviest first */
    bool power_heads;     /* prefill: a tile has room for the group's heads rounded up to a power of two */
    int32_t split_tokens; /* decode: keys of a split, given as -DSPLIT_TOKENS */
    int32_t item_tokens;  /* append, gather: tokens a work-group takes, given as -DITEM_TOKENS; 0 = 1 */
    int32_t tile_rows;    /* prefill: query rows times heads of a tile, given as -DTILE_ROWS */
    /* prefill: 0, or a step's tiles may be lower, by parts of tile_rows / tile_parts; tile_costs[n] is how long 128
     * keys take a tile of n parts, [0] what a tile takes beside, in any unit. */
    int32_t tile_parts;
    const int32_t *tile_costs;
    bool undocumented; /* relies on driver behaviour that no document promises: PTX edited after compilation
                          (lib/device/ptx.c), local memory beyond the reported limit. It serves where its trial
                          passed (lib/device/trial.c) */
    /* Of the trial: launches the variant on a device over a context of its own, which takes no other one of the family.
     * DEVICE: the launch failed there. UNSUPPORTED: it gave wrong results, or could not be made. NULL: that the variant
     * can be built is enough. */
    kvleaf_status (*trial)(kvleaf_device *device, const struct kvl_variant *variant, const kvl_geometry *geometry);
    /* decode: NULL, or a work-group takes a run of splits and folds them: the longest, a power of two, given as
     * -DLONGEST_RUN. Where there is no kvl_fold, the kernel folds the runs as well, in one launch. */
    int32_t (*longest_run)(const kvl_geometry *geometry);
    int32_t unit_groups; /* work-groups that a compute unit is thought to have at once; a kernel that folds the runs
                            then has one a run. 0 = 1, and it takes them from a queue */
    /* decode: NULL, or a piece of work may be a split that several rows have in the same blocks: how many pairs of
     * a row and a KV head at most. share_from: rows from which that was measured to be faster. */
    int32_t (*shared_pairs)(const kvl_geometry *geometry);
    int32_t share_from;
} kvl_variant;

typedef struct kvl_chosen {
    const kvl_variant *variant;
    cl_program program; /* the device's */
    int32_t work_group; /* as built */
    char key[128];      /* "decode.cpu.q_f32.kv_f16.d128.b16" */
} kvl_chosen;

/* The printed key of a variant for a geometry; "contiguous" K/V is b0; a window and a softcap that it serves follow as
 * ".w4096.cap50". */
void kvl_variant_key(const kvl_variant *variant, const kvl_geometry *geometry, char *key, size_t size);

/* Takes the best variant of the table (device->variants may force one). UNSUPPORTED: none serves; the message gives
 * each one's reason. */
kvleaf_status kvl_variant_choose(kvleaf_device *device, const kvl_variant *table, int count,
                                 const kvl_geometry *geometry, kvl_chosen *out);

/* Tries one variant: OK and *out filled, or UNSUPPORTED / DEVICE with the reason in the last error. */
kvleaf_status kvl_variant_try(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                              kvl_chosen *out);

/* Whether an undocumented variant passes its trial, or passed it before: UNSUPPORTED with the reason where it does not.
 */
kvleaf_status kvl_trial_pass(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry);

/* Appends the build options as the first build has them. */
void kvl_variant_options(const kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                         kvl_text *out);

#endif
