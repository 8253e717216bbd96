"""One embedding row, widened to float32, from a row-major table or from the packed output head."""

from caldrix_kernels.intrinsics.jit import entry, routine
from caldrix_kernels.intrinsics.memory import bits_to_float, half_at, load_f32, load_u16, store_f32
from caldrix_kernels.step.layout import BF16, F16, PANEL


@routine("float32(int64, int64)")
def _value(form, address):
    if form == BF16:
        return bits_to_float(load_u16(address) << 16)
    if form == F16:
        return half_at(address)
    return load_f32(address)


@entry("void(int64, int64, int64, int64, int64, int64)")
def embed_row_major(form, table, row_bytes, token, width, out):
    size = 4 if form not in (BF16, F16) else 2
    row = table + token * row_bytes
    for k in range(width):
        store_f32(out + 4 * k, _value(form, row + k * size))


@entry("void(int64, int64, int64, int64, int64, int64)")
def embed_panelled(form, panels, panel_bytes, token, width, out):
    """Row `token` of a matrix packed by `pack_panels` in panels of `panel_bytes`."""
    lane = token & (PANEL - 1)
    base = panels + (token // PANEL) * panel_bytes
    for k in range(width):
        if form == BF16:
            address = base + (k >> 1) * 128 + (lane >> 4) * 64 + (lane & 15) * 4 + (k & 1) * 2
        elif form == F16:
            address = base + k * 64 + lane * 2
        else:
            address = base + k * 128 + lane * 4
        store_f32(out + 4 * k, _value(form, address))
