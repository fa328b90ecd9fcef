/* The loader's loop: stored bytes -> checked, decoded, cropped, resized, flipped pixels. */
#include <stdlib.h>
#include <string.h>

#include "images.h"

enum { MAX_SIDE = 65535 };

static int sink_open(Sink *sink, int64_t scale) {
    const View *view = &sink->view;
    const Axis down = axis_of(view->top, view->box_height, view->side, scale);
    const Axis across = axis_of(view->left, view->box_width, view->side, scale);
    Region *needs = &sink->needs;
    *needs = (Region){first_pixel(&down, 0), end_pixel(&down, view->side - 1), first_pixel(&across, 0),
                      end_pixel(&across, view->side - 1)};
    if (view->resize == AREA) {
        const int64_t columns = needs->end_column - needs->first_column;
        return resizer_open(&sink->resizer, down, across, needs->first_column, columns, view->flip != 0, view->out);
    }
    Resampler *r = &sink->resampler;
    if (!resampler_open(r, view)) return 0;
    needs->first_row = r->first_row, needs->first_column = r->first_column, needs->end_column = r->end_column;
    /* A kernel that leaves out the last rows is given them still: the verdict is of all that the box holds. */
    if (r->end_row > needs->end_row) needs->end_row = r->end_row;
    return 1;
}

int sinks_open(Sinks *all, int64_t scale) {
    for (int64_t i = 0; i < all->count; i++) {
        Sink *sink = &all->sinks[i];
        if (!sink_open(sink, scale)) return 0;
        if (i == 0) all->needs = sink->needs;
        if (sink->needs.first_row < all->needs.first_row) all->needs.first_row = sink->needs.first_row;
        if (sink->needs.end_row > all->needs.end_row) all->needs.end_row = sink->needs.end_row;
        if (sink->needs.first_column < all->needs.first_column) all->needs.first_column = sink->needs.first_column;
        if (sink->needs.end_column > all->needs.end_column) all->needs.end_column = sink->needs.end_column;
    }
    return 1;
}

void sinks_take(Sinks *all, int64_t row, const uint8_t *pixels) {
    for (int64_t i = 0; i < all->count; i++) {
        Sink *sink = &all->sinks[i];
        const uint8_t *own = pixels + (sink->needs.first_column - all->needs.first_column) * 3;
        if (sink->view.resize == AREA)
            resizer_take(&sink->resizer, row, own);
        else
            resampler_take(&sink->resampler, row, own);
    }
}

void sinks_close(Sinks *all, int are_complete) {
    for (int64_t i = 0; i < all->count; i++) {
        Sink *sink = &all->sinks[i];
        if (are_complete && sink->view.resize != AREA) resampler_finish(&sink->resampler);
        resizer_close(&sink->resizer);
        resampler_close(&sink->resampler);
        sink->resizer = (Resizer){0}, sink->resampler = (Resampler){0};
    }
}

/* Views of a picture that is stored as packed RGB rows. */
static int views_of_raw(const uint8_t *pixels, uint64_t size, Sinks *all) {
    const int64_t height = all->sinks[0].view.height, width = all->sinks[0].view.width;
    if (size != (uint64_t)height * (uint64_t)width * 3) return WRONG_SIZE;
    if (!sinks_open(all, 1)) return NO_MEMORY;
    for (int64_t row = all->needs.first_row; row < all->needs.end_row; row++)
        sinks_take(all, row, pixels + (row * width + all->needs.first_column) * 3);
    return OK;
}

static int is_possible(const View *view) {
    return view->height >= 1 && view->width >= 1 && view->height <= MAX_SIDE && view->width <= MAX_SIDE &&
           view->top >= 0 && view->left >= 0 && view->box_height >= 1 && view->box_width >= 1 &&
           view->top <= view->height - view->box_height && view->left <= view->width - view->box_width;
}

/* Checks a picture and fills its views; returns its status. */
static int views_of(const uint8_t *image, uint64_t size, const uint32_t *crc, int is_raw, int may_scale, Sinks *all) {
    if (crc && vitscale_crc32c(image, size) != *crc) return CRC_MISMATCH;
    for (int64_t i = 0; i < all->count; i++)
        if (!is_possible(&all->sinks[i].view)) return WRONG_SIZE;
    const int status = is_raw ? views_of_raw(image, size, all) : views_of_jpeg(image, size, may_scale, all);
    sinks_close(all, status == OK);
    return status;
}

/* `images.decode_slice` says what the arguments are; `stored_bytes` and `count` are their lengths. View v of picture b
 * has box and flip number b * views + v, and goes to outs[v] + b * strides[v]. */
void vitscale_decode_slice(const uint8_t *stored, int64_t stored_bytes, int64_t count, const int64_t *starts,
                           const int64_t *sizes, const uint32_t *crcs, const uint8_t *checked, const uint8_t *raw,
                           const int64_t *heights, const int64_t *widths, const int32_t *boxes, const uint8_t *flips,
                           int64_t views, const int64_t *sides, const int64_t *resizes, uint8_t *const *outs,
                           const int64_t *strides, int may_scale, int32_t *status) {
    Sinks all = {calloc((size_t)views, sizeof(Sink)), views, {0}};
    for (int64_t b = 0; b < count; b++, boxes += 4 * views, flips += views) {
        const int is_there = sizes[b] >= 0 && starts[b] >= 0 && starts[b] <= stored_bytes - sizes[b];
        if (status[b] == OK && !is_there) status[b] = REFUSED;
        if (status[b] == OK && !all.sinks) status[b] = NO_MEMORY;
        if (status[b] == OK) {
            for (int64_t v = 0; v < views; v++)
                all.sinks[v].view = (View){heights[b],
                                           widths[b],
                                           boxes[4 * v],
                                           boxes[4 * v + 1],
                                           boxes[4 * v + 2],
                                           boxes[4 * v + 3],
                                           flips[v],
                                           sides[v],
                                           resizes[v],
                                           outs[v] + b * strides[v]};
            status[b] = views_of(stored + starts[b], (uint64_t)sizes[b], checked[b] ? crcs + b : NULL, raw[b],
                                 may_scale, &all);
        }
        for (int64_t v = 0; v < views && status[b] != OK; v++)
            memset(outs[v] + b * strides[v], 0, (size_t)(sides[v] * sides[v] * 3));
    }
    free(all.sinks);
}

/* Of all functions here; vitscale/ground/native/__init__.py expects the same. */
int vitscale_version(void) { return 8; }
