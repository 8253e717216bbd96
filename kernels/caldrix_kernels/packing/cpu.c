// Packing of panels: sixteen units of every row at a time, so that what is written stays in the cache.
// A unit is what a tile keeps together of one row: two bfloat16, one float16 or one float32.
#include "kernels.h"

enum { UNITS = 16 };

// Units begin..end-1 of one row to their places, `stride` bytes apart.
static void turn(int64_t unit, int64_t source, int64_t begin, int64_t end, int64_t out, int64_t stride)
{
    if (unit == 2)
        for (int64_t k = begin; k < end; k++) store_u16(out + k * stride, load_u16(source + 2 * k));
    else
        for (int64_t k = begin; k < end; k++) store_u32(out + k * stride, load_u32(source + 4 * k));
}

// Write panels first..last-1. `rows` is the address of int64 row addresses, 32 a panel.
//
// `columns` are stored, `padded` are written (zeros after `columns`).
EXPORTED void pack_panels(
    int64_t form, int64_t rows, int64_t first, int64_t last, int64_t columns, int64_t padded, int64_t target,
    int64_t panel_bytes)
{
    int64_t together = form == AT_BF16 ? 2 : 1, unit = form == AT_F16 ? 2 : 4, stride = AT_PANEL * unit;
    int64_t units = columns / together, packed = padded / together * stride;
    for (int64_t panel = first; panel < last; panel++) {
        int64_t base = target + panel * panel_bytes, sources = rows + 8 * panel * AT_PANEL;
        for (int64_t begin = 0; begin < units; begin += UNITS)
            for (int64_t lane = 0; lane < AT_PANEL; lane++)
                turn(
                    unit, load_i64(sources + 8 * lane), begin, smaller(begin + UNITS, units),
                    base + unit * lane, stride);
        memset((void *)(base + units * stride), 0, (size_t)(packed - units * stride));
        if (columns % together != 0) // half a unit: the last bfloat16 of an odd row
            for (int64_t lane = 0; lane < AT_PANEL; lane++)
                store_u32(
                    base + units * stride + unit * lane,
                    load_u16(load_i64(sources + 8 * lane) + 2 * (columns - 1)));
    }
}
