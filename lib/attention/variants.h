/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_ATTENTION_VARIANTS_H
#define KVL_ATTENTION_VARIANTS_H

/* The table of every variant of every operation. */

#include "device/variant.h"

typedef enum kvl_operation { KVL_APPEND, KVL_DECODE, KVL_PREFILL, KVL_GATHER, KVL_MERGE, KVL_OPERATIONS } kvl_operation;

/* "append", "decode", ... */
const char *kvl_operation_name(kvl_operation operation);

/* The variants of an operation, generic first. */
const kvl_variant *kvl_variants(kvl_operation operation, int *count);

/* Keys of the longest run of a decode variant; 0: it takes none. What has more than KVL_PART_KEYS comes in parts of so
 * many or fewer (PART_SPLITS in nvidia/decode_shape.clh). */
enum { KVL_PART_KEYS = 4096 };
int32_t kvl_longest_run_keys(const kvl_variant *variant, const kvl_geometry *geometry);

#endif
