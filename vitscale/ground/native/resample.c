/* One picture's box resampled by a kernel, row by row, as the rows come: what other libraries' evaluations see.
 *
 * Weights and their rounding are Pillow's, so that with antialiasing the pixels are those of its two passes, bit for bit:
 * across, rounded to 8 bits, then down. (Pillow 13 goes down first where that is cheaper: some values are a level apart.) Without
 * antialiasing the kernel keeps its width however much a picture shrinks, as TensorFlow's `tf.image.resize` has it by
 * default. Pixels beside the box play their part where the picture has any.
 */
#include <math.h>
#include <stdlib.h>

#include "images.h"

enum { PRECISION = 22 }; /* bits behind the point of a weight */

static double triangle(double x) {
    x = fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

static double cubic(double x) { /* Keys, 1981, with a = -1 / 2 */
    x = fabs(x);
    if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1.0;
    return x < 2.0 ? (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5 : 0.0;
}

static int taps_open(Taps *taps, int64_t pixels, int64_t start, int64_t length, int64_t side, int resize) {
    double (*const kernel)(double) = resize == PIL_BICUBIC ? cubic : triangle;
    const double scale = (double)length / (double)side;
    const double wide = resize != TF_BILINEAR && scale > 1.0 ? scale : 1.0;
    const double reach = (resize == PIL_BICUBIC ? 2.0 : 1.0) * wide;
    const int64_t most = 2 * (int64_t)ceil(reach) + 1;
    double *exact = malloc((size_t)most * sizeof *exact);
    taps->most = most;
    taps->first = malloc((size_t)side * sizeof *taps->first);
    taps->count = malloc((size_t)side * sizeof *taps->count);
    taps->weights = malloc((size_t)(side * most) * sizeof *taps->weights);
    const int is_there = exact && taps->first && taps->count && taps->weights;
    for (int64_t i = 0; is_there && i < side; i++) {
        const double centre = (double)start + ((double)i + 0.5) * scale;
        int64_t first = (int64_t)(centre - reach + 0.5), end = (int64_t)(centre + reach + 0.5);
        if (centre - reach + 0.5 < 0.0) first = 0;
        if (end > pixels) end = pixels;
        double whole = 0.0;
        for (int64_t k = 0; k < end - first; k++)
            whole += exact[k] = kernel(((double)(first + k) - centre + 0.5) * (1.0 / wide));
        for (int64_t k = 0; k < end - first; k++) {
            const double weight = exact[k] / whole * (1 << PRECISION);
            taps->weights[i * most + k] = (int32_t)(weight < 0.0 ? weight - 0.5 : weight + 0.5);
        }
        taps->first[i] = first, taps->count[i] = end - first;
    }
    free(exact);
    return is_there;
}

static void taps_close(Taps *taps) {
    free(taps->first);
    free(taps->count);
    free(taps->weights);
}

static uint8_t rounded(int64_t total) {
    const int64_t value = total >> PRECISION;
    return value < 0 ? 0 : value > 255 ? 255 : (uint8_t)value;
}

/* The pixels that the last output row or column ends with, and the first that the first one needs. */
static void span_of(const Taps *taps, int64_t side, int64_t *first, int64_t *end) {
    *first = taps->first[0], *end = 0;
    for (int64_t i = 0; i < side; i++)
        if (taps->first[i] + taps->count[i] > *end) *end = taps->first[i] + taps->count[i];
}

/* Returns 0 where there is no memory. Says which rows and columns it has to be given. */
int resampler_open(Resampler *r, const View *view) {
    r->side = view->side, r->flip = view->flip != 0, r->out = view->out;
    const int has_taps =
        taps_open(&r->down, view->height, view->top, view->box_height, view->side, (int)view->resize) &
        taps_open(&r->across, view->width, view->left, view->box_width, view->side, (int)view->resize);
    if (!has_taps) return 0;
    span_of(&r->down, r->side, &r->first_row, &r->end_row);
    span_of(&r->across, r->side, &r->first_column, &r->end_column);
    r->rows = malloc((size_t)((r->end_row - r->first_row) * r->side * 3));
    return r->rows != NULL;
}

/* The next row, from column `first_column` on; its number in the picture. */
void resampler_take(Resampler *r, int64_t pixel, const uint8_t *row) {
    if (pixel < r->first_row || pixel >= r->end_row) return;
    uint8_t *out = r->rows + (pixel - r->first_row) * r->side * 3;
    for (int64_t i = 0; i < r->side; i++, out += 3) {
        const int64_t column = r->flip ? r->side - 1 - i : i;
        const uint8_t *from = row + 3 * (r->across.first[column] - r->first_column);
        const int32_t *weights = r->across.weights + column * r->across.most;
        int64_t total[3] = {1 << (PRECISION - 1), 1 << (PRECISION - 1), 1 << (PRECISION - 1)};
        for (int64_t k = 0; k < r->across.count[column]; k++, from += 3)
            for (int c = 0; c < 3; c++) total[c] += (int64_t)weights[k] * from[c];
        for (int c = 0; c < 3; c++) out[c] = rounded(total[c]);
    }
}

/* The output, when all rows were there. */
void resampler_finish(Resampler *r) {
    const int64_t values = r->side * 3;
    for (int64_t i = 0; i < r->side; i++) {
        const uint8_t *from = r->rows + (r->down.first[i] - r->first_row) * values;
        const int32_t *weights = r->down.weights + i * r->down.most;
        for (int64_t v = 0; v < values; v++) {
            int64_t total = 1 << (PRECISION - 1);
            for (int64_t k = 0; k < r->down.count[i]; k++) total += (int64_t)weights[k] * from[k * values + v];
            r->out[i * values + v] = rounded(total);
        }
    }
}

void resampler_close(Resampler *r) {
    taps_close(&r->down);
    taps_close(&r->across);
    free(r->rows);
}
