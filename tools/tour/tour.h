/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_TOUR_H
#define KVLEAF_TOUR_H

/* The tour: the worked figures that the project's four seed documents print, computed by the library in front of the
 * reader. Public calls only, so every function here is also an example of its use. */

#include <kvleaf/kvleaf.h>

#include "common/cli.h"

typedef struct tour {
    const cli *program;
    kvleaf_device *device;
    cl_command_queue queue;
    cJSON *row; /* of the figure being shown */
    bool right; /* all its checks so far */
    int passed, failed, skipped;
} tour;

/* A figure: its heading, what it says for people (nothing with --json), named values (both), its checks. */
void tour_begin(tour *t, int figure, const char *title, const char *documents);
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void tour_say(tour *t, const char *format, ...);
void tour_ints(tour *t, const char *name, const int32_t *values, int count);
void tour_floats(tour *t, const char *name, const float *values, int count);
void tour_check(tour *t, bool right, const char *claim);
void tour_end(tour *t);
/* A figure this version does not have yet. */
void tour_skip(tour *t, int figure, const char *title, const char *why);

/* Ends the program where a call failed; the tour needs no way on. */
void tour_must(tour *t, kvleaf_status status, const char *what);
#define MUST(call) tour_must(t, call, #call)

/* Device memory for small examples. */
cl_mem tour_upload(tour *t, const void *data, size_t bytes);
void tour_download(tour *t, cl_mem memory, void *data, size_t bytes);
kvleaf_tensor tour_floats_tensor(cl_mem memory);

/* A managed cache of one layer in float32. */
typedef struct small {
    kvleaf_pool *pool;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    int32_t heads, dim; /* query heads = KV heads */
} small;

void small_open(tour *t, small *s, int32_t num_blocks, int32_t block_size, const int32_t *free_order,
                int32_t free_count);
void small_close(small *s);
/* Adds `count` tokens to the sequence; ids NULL: unknown ones. Returns how many the prefix cache has. */
int32_t small_extend(tour *t, small *s, kvleaf_seq seq, const int32_t *ids, int32_t count);
/* Computes its next `count` tokens and attends: q, k, v, out [count, heads, dim]. k_back and v_back, where not NULL,
 * receive all of the sequence's K and V, gathered through its table. */
void small_compute(tour *t, small *s, kvleaf_seq seq, int32_t count, const float *q, const float *k, const float *v,
                   float *out, float *k_back, float *v_back);
/* Both, for tokens of unknown ids. */
void small_step(tour *t, small *s, kvleaf_seq seq, int32_t count, const float *q, const float *k, const float *v,
                float *out, float *k_back, float *v_back);
/* Prints the block table as "name  [..]" and puts it in `table` (at least 16); returns its length. */
int32_t small_table(tour *t, const small *s, kvleaf_seq seq, const char *name, int32_t *table);

/* The figures, by the documents' order. */
void figure_varlen(tour *t);
void figure_decode(tour *t);
void figure_scalar_head(tour *t);
void figure_scattered(tour *t);
void figure_copy_on_write(tour *t);
void figure_samples(tour *t);
void figure_waste(tour *t);
void figure_size(tour *t);
void figure_prefix_cache(tour *t);

/* A few requests in one pool, as a coloured grid on stdout (not with --json) and, unless svg_path is NULL, as SVG. */
void tour_picture(tour *t, const char *svg_path);

#endif
