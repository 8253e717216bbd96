// Routing of rows to experts through the route tables of step.layout.
//
// An expert's rows stand together, in row order, so that its weights are read once; what the experts made of
// a row is added in ascending order of experts, so that neighbours never change a sum.
#include "stages.h"

enum { IDS, PLACES, SOURCES, WEIGHTS };

// Address of a route table.
static int64_t table_at(int64_t step, int64_t row, int64_t number)
{
    return address_at(step, word(row, AT_ROUTES)) + 8 * (AT_ROUTE_TABLES + number * places_of(step, row));
}

// Count the pairs of each expert, cut its places into groups and leave its first place at its cursor.
static void cut_groups(int64_t step, int64_t row, int64_t count, int64_t cursors)
{
    int64_t ids = table_at(step, row, IDS), routes = address_at(step, word(row, AT_ROUTES));
    int64_t experts = word(row, AT_EXPERTS), start = 0, groups = 0;
    memset((void *)cursors, 0, 8 * (size_t)experts);
    for (int64_t pair = 0; pair < count; pair++) {
        int64_t cursor = cursors + 8 * word(ids, pair);
        store_i64(cursor, load_i64(cursor) + 1);
    }
    for (int64_t expert = 0; expert < experts; expert++) {
        int64_t own = word(cursors, expert);
        store_i64(cursors + 8 * expert, start);
        for (int64_t first = 0; first < own; first += AT_ROW_BLOCK) {
            int64_t group = group_at(step, row, routes, groups++);
            store_i64(group, expert);
            store_i64(group + 8, start + first);
            store_i64(group + 16, smaller(AT_ROW_BLOCK, own - first));
        }
        start += own;
    }
    store_i64(routes + 8 * AT_GROUPS, groups);
}

// Give each of `count` (row, expert) pairs its place, and cut the places of an expert into groups.
static void sort_rows(int64_t step, int64_t row, int64_t count)
{
    int64_t ids = table_at(step, row, IDS), places = table_at(step, row, PLACES);
    int64_t sources = table_at(step, row, SOURCES), routes = address_at(step, word(row, AT_ROUTES));
    int64_t most = word(row, AT_EXPERTS) + places_of(step, row) / AT_ROW_BLOCK + 1;
    int64_t cursors = group_at(step, row, routes, most), top_k = word(row, AT_TOP_K);
    cut_groups(step, row, count, cursors);
    for (int64_t pair = 0; pair < count; pair++) {
        int64_t cursor = cursors + 8 * word(ids, pair), place = load_i64(cursor);
        store_i64(cursor, place + 1);
        store_i64(places + 8 * pair, place);
        store_i64(sources + 8 * place, pair / top_k);
    }
}

// Pick the experts of one row; who finishes the last row sorts them all.
void route_item(int64_t step, int64_t thread, int64_t row, int64_t m)
{
    (void)thread;
    int64_t rows = row_count(step, row), top_k = word(row, AT_TOP_K), first = m * top_k;
    int64_t scores = address_at(step, word(row, AT_SOURCE)) + m * word(row, AT_SOURCE_STRIDE);
    int64_t ids = table_at(step, row, IDS) + 8 * first, weights = table_at(step, row, WEIGHTS) + 4 * first;
    kernel_6 route = (kernel_6)kernel_at(step, AT_ROUTE_ROW);
    route(scores, word(row, AT_EXPERTS), top_k, word(row, AT_NORMALISE), ids, weights);
    int64_t routed = address_at(step, word(row, AT_ROUTES)) + 8 * AT_ROUTED;
    if (atomic_add(routed, 1) == rows - 1) {
        atomic_store(routed, 0);
        sort_rows(step, row, rows * top_k);
    }
}

// Copy a row, in whatever form it is, to a place where its expert reads it.
void dispatch_item(int64_t step, int64_t thread, int64_t row, int64_t place)
{
    int64_t m = word(table_at(step, row, SOURCES), place), stride = word(row, AT_SOURCE_STRIDE);
    int64_t source = source_of(step, thread, row) + m * stride;
    int64_t target = address_at(step, word(row, AT_TARGET)) + place * word(row, AT_TARGET_STRIDE);
    memcpy((void *)target, (const void *)source, (size_t)stride);
}

// Add what its experts made of a row to the residual.
void combine_item(int64_t step, int64_t thread, int64_t row, int64_t m)
{
    (void)thread;
    int64_t top_k = word(row, AT_TOP_K), first = m * top_k;
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
    int64_t parts = address_at(step, word(row, AT_PARTS_OF)), stride = word(row, AT_PARTS_STRIDE);
    int64_t places = table_at(step, row, PLACES) + 8 * first;
    int64_t weights = table_at(step, row, WEIGHTS) + 4 * first;
    kernel_7 combine = (kernel_7)kernel_at(step, AT_COMBINE_ROW);
    combine(out, word(row, AT_COLUMNS), parts, stride, places, weights, top_k);
}
