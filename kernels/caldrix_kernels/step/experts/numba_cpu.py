"""Routing of rows to experts through the route tables of step.layout.

An expert's rows stand together, in row order, so that its weights are read once; what the experts made of
a row is added in ascending order of experts, so that neighbours never change a sum.
"""

from caldrix_kernels.intrinsics.jit import call, routine
from caldrix_kernels.intrinsics.memory import (
    atomic_add,
    atomic_store,
    load_i64,
    store_i64,
)
from caldrix_kernels.schedule.numba_cpu import address, kernel_at, word
from caldrix_kernels.step import layout as at
from caldrix_kernels.step.dense.numba_cpu import copy_row, group_at, places_of, row_count, source_of
from caldrix_kernels.step.layout import ROW_BLOCK


@routine("int64(int64, int64, int64)")
def table_at(step, row, number):
    """Address of a route table: 0 ids, 1 places, 2 sources, 3 weights."""
    routes = address(step, word(row, at.ROUTES))
    return routes + 8 * (at.ROUTE_TABLES + number * places_of(step, row))


@routine("void(int64, int64, int64)")
def sort_rows(step, row, count):
    """Give each of `count` (row, expert) pairs its place, and cut the places of an expert into groups."""
    ids, places, sources = table_at(step, row, 0), table_at(step, row, 1), table_at(step, row, 2)
    routes = address(step, word(row, at.ROUTES))
    experts, top_k = word(row, at.EXPERTS), word(row, at.TOP_K)
    cursors = group_at(step, row, routes, experts + places_of(step, row) // ROW_BLOCK + 1)
    for expert in range(experts):
        store_i64(cursors + 8 * expert, 0)
    for pair in range(count):
        cursor = cursors + 8 * load_i64(ids + 8 * pair)
        store_i64(cursor, load_i64(cursor) + 1)
    start, groups = 0, 0
    for expert in range(experts):
        own = load_i64(cursors + 8 * expert)
        store_i64(cursors + 8 * expert, start)
        for first in range(0, own, ROW_BLOCK):
            group = group_at(step, row, routes, groups)
            store_i64(group, expert)
            store_i64(group + 8, start + first)
            store_i64(group + 16, min(ROW_BLOCK, own - first))
            groups += 1
        start += own
    store_i64(routes + 8 * at.GROUPS, groups)
    for pair in range(count):
        cursor = cursors + 8 * load_i64(ids + 8 * pair)
        place = load_i64(cursor)
        store_i64(cursor, place + 1)
        store_i64(places + 8 * pair, place)
        store_i64(sources + 8 * place, pair // top_k)


@routine("void(int64, int64, int64)")
def route_item(step, row, m):
    """Pick the experts of one row; who finishes the last row sorts them all."""
    top_k, rows = word(row, at.TOP_K), row_count(step, row)
    scores = address(step, word(row, at.SOURCE)) + m * word(row, at.SOURCE_STRIDE)
    ids, weights = table_at(step, row, 0) + 8 * m * top_k, table_at(step, row, 3) + 4 * m * top_k
    route = (scores, word(row, at.EXPERTS), top_k, word(row, at.NORMALISE), ids, weights)
    call(kernel_at(step, at.ROUTE_ROW), route)
    routed = address(step, word(row, at.ROUTES)) + 8 * at.ROUTED
    if atomic_add(routed, 1) == rows - 1:
        atomic_store(routed, 0)
        sort_rows(step, row, rows * top_k)


@routine("void(int64, int64, int64, int64)")
def dispatch_item(step, thread, row, place):
    """Copy a row to a place where its expert reads it."""
    m = load_i64(table_at(step, row, 2) + 8 * place)
    stride = word(row, at.SOURCE_STRIDE)
    source = source_of(step, thread, row, row_count(step, row)) + m * stride
    copy_row(source, address(step, word(row, at.TARGET)) + place * word(row, at.TARGET_STRIDE), stride)


@routine("void(int64, int64, int64)")
def combine_item(step, row, m):
    """Add what its experts made of a row to the residual."""
    first, top_k = m * word(row, at.TOP_K), word(row, at.TOP_K)
    out = address(step, word(row, at.TARGET)) + m * word(row, at.TARGET_STRIDE)
    parts, stride = address(step, word(row, at.PARTS_OF)), word(row, at.PARTS_STRIDE)
    places, weights = table_at(step, row, 1) + 8 * first, table_at(step, row, 3) + 4 * first
    combine = (out, word(row, at.COLUMNS), parts, stride, places, weights, top_k)
    call(kernel_at(step, at.COMBINE_ROW), combine)
