/* SPDX-License-Identifier: Apache-2.0 */
#include "blocks/blocks.h"

void kvl_free_list_init(kvl_free_list *list, kvl_block *blocks, int32_t num_blocks)
{
    *list = (kvl_free_list){.blocks = blocks, .first = KVL_LIST_END, .last = KVL_LIST_END};
    for (int32_t i = 0; i < num_blocks; i++)
        blocks[i].next = KVL_UNLISTED;
}

int32_t kvl_free_list_take(kvl_free_list *list)
{
    int32_t block = list->first;
    if (block != KVL_LIST_END)
        kvl_free_list_remove(list, block);
    return block;
}

bool kvl_free_list_give(kvl_free_list *list, int32_t block)
{
    kvl_block *given = &list->blocks[block];
    if (given->next != KVL_UNLISTED)
        return false;
    given->previous = list->last;
    given->next = KVL_LIST_END;
    if (list->last == KVL_LIST_END)
        list->first = block;
    else
        list->blocks[list->last].next = block;
    list->last = block;
    list->count++;
    return true;
}

bool kvl_free_list_remove(kvl_free_list *list, int32_t block)
{
    kvl_block *taken = &list->blocks[block];
    if (taken->next == KVL_UNLISTED)
        return false;
    if (taken->previous == KVL_LIST_END)
        list->first = taken->next;
    else
        list->blocks[taken->previous].next = taken->next;
    if (taken->next == KVL_LIST_END)
        list->last = taken->previous;
    else
        list->blocks[taken->next].previous = taken->previous;
    taken->next = KVL_UNLISTED;
    list->count--;
    return true;
}
