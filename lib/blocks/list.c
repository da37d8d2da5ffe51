/* SPDX-License-Identifier: Apache-2.0 */
#include "blocks/blocks.h"

void kvl_list_init(kvl_block_list *list, kvl_block *blocks)
{
    *list = (kvl_block_list){.blocks = blocks, .first = KVL_LIST_END, .last = KVL_LIST_END};
}

int32_t kvl_list_take(kvl_block_list *list)
{
    int32_t block = list->first;
    if (block != KVL_LIST_END)
        kvl_list_remove(list, block);
    return block;
}

bool kvl_list_insert(kvl_block_list *list, int32_t block, int32_t before)
{
    kvl_block *given = &list->blocks[block];
    if (given->next != KVL_UNLISTED)
        return false;
    given->previous = before == KVL_LIST_END ? list->last : list->blocks[before].previous;
    given->next = before;
    if (given->previous == KVL_LIST_END)
        list->first = block;
    else
        list->blocks[given->previous].next = block;
    if (before == KVL_LIST_END)
        list->last = block;
    else
        list->blocks[before].previous = block;
    list->count++;
    return true;
}

bool kvl_list_give(kvl_block_list *list, int32_t block)
{
    return kvl_list_insert(list, block, KVL_LIST_END);
}

bool kvl_list_remove(kvl_block_list *list, int32_t block)
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
