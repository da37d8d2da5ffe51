/* SPDX-License-Identifier: Apache-2.0 */
#include "info/info.h"

#include <kvleaf/pool.h>

#include <stdio.h>
#include <string.h>

enum { MAX_VARIANTS = 32 };

/* What became of one variant. */
typedef struct trial {
    const kvl_variant *variant;
    bool usable;
    int32_t work_group;
    char key[128];
    char reason[512]; /* why it isn't used; "" for the chosen one */
} trial;

static void try_all(kvleaf_device *device, const kvl_variant *table, int count, const kvl_geometry *geometry,
                    trial *trials)
{
    for (int i = 0; i < count; i++) {
        kvl_chosen chosen = {0};
        trials[i] = (trial){.variant = &table[i]};
        kvl_variant_key(&table[i], geometry, trials[i].key, sizeof trials[i].key);
        trials[i].usable = kvl_variant_try(device, &table[i], geometry, &chosen) == KVLEAF_OK;
        trials[i].work_group = chosen.work_group;
        if (!trials[i].usable)
            snprintf(trials[i].reason, sizeof trials[i].reason, "%.*s", (int)sizeof trials[i].reason - 1,
                     kvleaf_last_error()->message);
    }
}

static void print_trial(const trial *t, bool chosen)
{
    if (chosen)
        printf("    %s%s%s  work-group %d%s\n", cli_colour(CLI_GREEN), t->key, cli_colour(CLI_PLAIN),
               (int)t->work_group, t->variant->persistent ? ", a work-group a compute unit" : "");
    else
        printf("    %s%s  %s%s\n", cli_colour(CLI_DIM), t->key, t->reason, cli_colour(CLI_PLAIN));
}

static void row_trial(const char *device_name, const char *operation, const trial *t, bool chosen)
{
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "info", "variant");
    cJSON_AddStringToObject(row, "device", device_name);
    cJSON_AddStringToObject(row, "operation", operation);
    cJSON_AddStringToObject(row, "variant", t->key);
    cJSON_AddBoolToObject(row, "chosen", chosen);
    cJSON_AddBoolToObject(row, "usable", t->usable);
    if (t->usable)
        cJSON_AddNumberToObject(row, "work_group", t->work_group);
    else
        cJSON_AddNullToObject(row, "work_group");
    if (chosen)
        cJSON_AddNullToObject(row, "reason");
    else
        cJSON_AddStringToObject(row, "reason", t->reason);
    cli_row(row);
}

/* The choice is the library's own; an operation that nothing serves is shown with every reason. */
static bool show_operation(const cli *program, kvleaf_device *device, kvl_operation operation,
                           const kvl_geometry *geometry)
{
    trial trials[MAX_VARIANTS];
    kvl_chosen chosen = {0};
    int count = 0;
    const kvl_variant *table = kvl_variants(operation, &count);
    if (count > MAX_VARIANTS)
        count = MAX_VARIANTS;
    try_all(device, table, count, geometry, trials);
    kvleaf_status status = kvl_variant_choose(device, table, count, geometry, &chosen);
    if (!program->json)
        printf("  %s%s\n", kvl_operation_name(operation), status == KVLEAF_OK ? "" : ": not served");
    for (int i = count - 1; i >= 0; i--) {
        bool is_chosen = status == KVLEAF_OK && chosen.variant == trials[i].variant;
        if (!is_chosen && trials[i].usable)
            snprintf(trials[i].reason, sizeof trials[i].reason, "usable, but %s %s", chosen.variant->name,
                     chosen.variant < trials[i].variant ? "is asked for" : "is better");
        if (program->json)
            row_trial(device->caps.device_name, kvl_operation_name(operation), &trials[i], is_chosen);
        else
            print_trial(&trials[i], is_chosen);
    }
    return status == KVLEAF_OK || status == KVLEAF_UNSUPPORTED;
}

bool info_variants(const cli *program, kvleaf_device *device, const kvl_geometry *geometry)
{
    bool right = true;
    if (!program->json)
        printf("\nVariants on %s for %d/%d heads, head_dim %d, block_size %d, q %s, K/V %s, layout %s:\n",
               device->caps.device_name, (int)geometry->num_heads, (int)geometry->num_kv_heads, (int)geometry->head_dim,
               (int)geometry->block_size, kvleaf_dtype_name(geometry->q_dtype), kvleaf_dtype_name(geometry->kv_dtype),
               kvleaf_layout_name(geometry->layout));
    for (int operation = 0; operation < KVL_OPERATIONS; operation++) {
        cli_progress("operations tried", operation, KVL_OPERATIONS);
        right = show_operation(program, device, (kvl_operation)operation, geometry) && right;
    }
    cli_progress("operations tried", KVL_OPERATIONS, KVL_OPERATIONS);
    return right;
}
