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

#endif
