// One embedding row, widened to float32, from a row-major table or from the packed output head.
#include "kernels.h"
#include "vector.h"

static float value_at(int64_t form, int64_t address)
{
    if (form == AT_BF16) return bits_to_float((uint32_t)load_u16(address) << 16);
    if (form == AT_F16) return widen_f16(load_u16(address));
    return load_f32(address);
}

void embed_row_major(
    int64_t form, int64_t table, int64_t row_bytes, int64_t token, int64_t width, int64_t out)
{
    int64_t size = form == AT_BF16 || form == AT_F16 ? 2 : 4, row = table + token * row_bytes;
    for (int64_t k = 0; k < width; k++) store_f32(out + 4 * k, value_at(form, row + k * size));
}

// Row `token` of a matrix packed by `pack_panels` in panels of `panel_bytes`.
void embed_panelled(
    int64_t form, int64_t panels, int64_t panel_bytes, int64_t token, int64_t width, int64_t out)
{
    int64_t lane = token % AT_PANEL, base = panels + token / AT_PANEL * panel_bytes;
    for (int64_t k = 0; k < width; k++) {
        int64_t address = base + k * 128 + lane * 4;
        if (form == AT_BF16)
            address = base + (k >> 1) * 128 + (lane >> 4) * 64 + (lane & 15) * 4 + (k & 1) * 2;
        else if (form == AT_F16)
            address = base + k * 64 + lane * 2;
        store_f32(out + 4 * k, value_at(form, address));
    }
}
