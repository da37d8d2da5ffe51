/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_SAFETENSORS_H
#define GENERATE_SAFETENSORS_H

/* Reads one .safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes.
 * Everything the header says is checked against the file's size before it is believed. */

#include <stdint.h>
#include <stdio.h>

#include "fail.h"

typedef enum weight_dtype { WEIGHT_F32 = 0, WEIGHT_F16 = 1, WEIGHT_BF16 = 2, WEIGHT_OTHER = 3 } weight_dtype;

enum { TENSOR_MAX_RANK = 8 };

typedef struct tensor_entry {
    char *name;
    char dtype_name[16];
    weight_dtype dtype;
    int32_t rank;
    int64_t shape[TENSOR_MAX_RANK];
    uint64_t begin, end; /* bytes, from the start of the file */
} tensor_entry;

typedef struct safetensors {
    FILE *file;
    char *path;
    tensor_entry *entries;
    int32_t count;
} safetensors;

/* Opens the file and reads its header. The caller closes it, after a failure too. */
bool safetensors_open(safetensors *file, const char *path, failure *error);
void safetensors_close(safetensors *file);

/* The entry of a tensor that must be there, float, and of this shape; rows = 0 asks for rank 1. */
bool safetensors_find(const safetensors *file, const char *name, int64_t rows, int64_t columns,
                      const tensor_entry **out, failure *error);

/* Reads `size` bytes from `offset` bytes into the tensor. */
bool safetensors_read(const safetensors *file, const tensor_entry *entry, uint64_t offset, void *data, size_t size,
                      failure *error);

size_t weight_dtype_size(weight_dtype dtype);

#endif
