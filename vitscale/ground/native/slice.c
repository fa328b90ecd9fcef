/* The loader's loop: stored bytes -> checked, decoded, cropped, resized, flipped pixels. */
#include <string.h>

#include "images.h"

enum { MAX_SIDE = 65535 };

/* A view of a picture that is stored as packed RGB rows. */
int view_raw(const uint8_t *pixels, uint64_t size, const View *view, uint8_t *out) {
    if (size != (uint64_t)view->height * (uint64_t)view->width * 3) return WRONG_SIZE;
    if (view->resize != AREA) {
        Resampler resampler = {0};
        const int is_open = resampler_open(&resampler, view, out);
        for (int64_t row = resampler.first_row; is_open && row < resampler.end_row; row++)
            resampler_take(&resampler, row, pixels + (row * view->width + resampler.first_column) * 3);
        if (is_open) resampler_finish(&resampler);
        resampler_close(&resampler);
        return is_open ? OK : NO_MEMORY;
    }
    const Axis down = axis_of(view->top, view->box_height, view->side, 1);
    const Axis across = axis_of(view->left, view->box_width, view->side, 1);
    Resizer resizer;
    if (!resizer_open(&resizer, down, across, view->left, view->box_width, view->flip != 0, out)) return NO_MEMORY;
    for (int64_t row = view->top; row < view->top + view->box_height; row++)
        resizer_take(&resizer, row, pixels + (row * view->width + view->left) * 3);
    resizer_close(&resizer);
    return OK;
}

static int is_possible(const View *view) {
    return view->height >= 1 && view->width >= 1 && view->height <= MAX_SIDE && view->width <= MAX_SIDE &&
           view->top >= 0 && view->left >= 0 && view->box_height >= 1 && view->box_width >= 1 &&
           view->top <= view->height - view->box_height && view->left <= view->width - view->box_width;
}

/* `images.decode_slice` says what the arguments are; `stored_bytes` and `count` are their lengths. */
void vitscale_decode_slice(const uint8_t *stored, int64_t stored_bytes, int64_t count, const int64_t *starts,
                           const int64_t *sizes, const uint32_t *crcs, const uint8_t *checked, const uint8_t *raw,
                           const int64_t *heights, const int64_t *widths, const int32_t *boxes, const uint8_t *flips,
                           int may_scale, int resize, uint8_t *out, int64_t side, int32_t *status) {
    const uint64_t out_bytes = (uint64_t)side * (uint64_t)side * 3;
    for (int64_t b = 0; b < count; b++, boxes += 4, out += out_bytes) {
        const View view = {heights[b], widths[b], boxes[0],  boxes[1], boxes[2],
                           boxes[3],   flips[b],  may_scale, side,     resize};
        const int is_there = sizes[b] >= 0 && starts[b] >= 0 && starts[b] <= stored_bytes - sizes[b];
        if (status[b] == OK && !is_there) status[b] = REFUSED;
        if (status[b] == OK) {
            const uint8_t *image = stored + starts[b];
            const uint64_t size = (uint64_t)sizes[b];
            if (checked[b] && vitscale_crc32c(image, size) != crcs[b])
                status[b] = CRC_MISMATCH;
            else if (!is_possible(&view))
                status[b] = WRONG_SIZE;
            else
                status[b] = raw[b] ? view_raw(image, size, &view, out) : view_jpeg(image, size, &view, out);
        }
        if (status[b] != OK) memset(out, 0, out_bytes);
    }
}

/* Of all functions here; vitscale/ground/native/__init__.py expects the same. */
int vitscale_version(void) { return 7; }
