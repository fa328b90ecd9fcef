/* One picture's box resampled by a kernel, row by row, as the rows come: what other libraries' evaluations see.
 *
 * Weights and their rounding are Pillow's, so that with antialiasing the pixels are those of its two passes, bit for bit:
 * across, rounded to 8 bits, then down. (Pillow 13 goes down first where that is cheaper: other roundings.) Without
 * antialiasing the kernel keeps its width however much a picture shrinks, as TensorFlow's `tf.image.resize` has it by
 * default. Pixels beside the box play their part where the picture has any.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    taps->weights = calloc((size_t)(side * most), sizeof *taps->weights);
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

/* The pixels that the last output row or column ends with, and the first that the first one needs. */
static void span_of(const Taps *taps, int64_t side, int64_t *first, int64_t *end) {
    *first = taps->first[0], *end = 0;
    for (int64_t i = 0; i < side; i++)
        if (taps->first[i] + taps->count[i] > *end) *end = taps->first[i] + taps->count[i];
}

/* Returns 0 where there is no memory. Says which rows and columns it has to be given. */
int resampler_open(Resampler *r, const View *view) {
    const int64_t side = view->side, pairs = (side + 1) / 2;
    r->side = side, r->out = view->out;
    const int has_taps =
        taps_open(&r->down, view->height, view->top, view->box_height, side, (int)view->resize) &
        taps_open(&r->across, view->width, view->left, view->box_width, side, (int)view->resize);
    if (!has_taps) return 0;
    span_of(&r->down, side, &r->first_row, &r->end_row);
    span_of(&r->across, side, &r->first_column, &r->end_column);
    const int64_t most = r->across.most, line = 3 * (r->end_column - r->first_column + most) + 8;
    const int64_t rows = (r->end_row - r->first_row) * side * 3 + 8;
    r->memory = calloc((size_t)(32 * (pairs * most + 1) + 16 * pairs + 4 * (line + 3 * side) + rows), 1);
    if (!r->memory) return 0;
    r->weights = (Places *)(((uintptr_t)r->memory + 31) & ~(uintptr_t)31);
    r->first = (int64_t *)(r->weights + pairs * most);
    r->line = (int32_t *)(r->first + 2 * pairs);
    r->totals = r->line + line;
    r->rows = (uint8_t *)(r->totals + 3 * side);
    for (int64_t i = 0; i < side; i++) {
        const int64_t column = view->flip ? side - 1 - i : i;
        r->first[i] = 3 * (r->across.first[column] - r->first_column);
        for (int64_t k = 0; k < most; k++)
            for (int lane = 0; lane < 4; lane++)
                r->weights[i / 2 * most + k][4 * (i % 2) + lane] = r->across.weights[column * most + k];
    }
    return 1;
}

static inline uint8_t rounded(int32_t total) {
    const int32_t value = total >> PRECISION;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

FOR_EVERY_PROCESSOR
static void widen(const uint8_t *restrict row, int64_t values, int32_t *restrict line) {
    for (int64_t i = 0; i < values; i++) line[i] = row[i];
}

/* Sums stay below 2^31, as weights of one output pixel never add up to twice the unit. Two pixels at a time, four lanes
 * each: three values, and one that the next pixel replaces, or that lies in spare room. */
FOR_EVERY_PROCESSOR
static void go_across(const int32_t *restrict line, const int64_t *restrict first, const Places *restrict weights,
                      int64_t most, int64_t side, uint8_t *restrict out) {
    for (int64_t i = 0; i < side; i += 2) {
        const int32_t *one = line + first[i], *other = line + first[i + 1];
        Places total = {1, 1, 1, 1, 1, 1, 1, 1};
        total <<= PRECISION - 1;
        for (int64_t k = 0; k < most; k++, one += 3, other += 3, weights++) {
            Places a, b;
            memcpy(&a, one, sizeof a);
            memcpy(&b, other, sizeof b);
            total += LOWER_HALVES(a, b) * *weights;
        }
        int32_t values[8];
        memcpy(values, &total, sizeof values);
        for (int lane = 0; lane < 4; lane++) out[3 * i + lane] = rounded(values[lane]);
        for (int lane = 0; lane < 4; lane++) out[3 * i + 3 + lane] = rounded(values[4 + lane]);
    }
}

/* The next row, from column `first_column` on; its number in the picture. */
void resampler_take(Resampler *r, int64_t pixel, const uint8_t *row) {
    if (pixel < r->first_row || pixel >= r->end_row) return;
    widen(row, 3 * (r->end_column - r->first_column), r->line);
    go_across(r->line, r->first, r->weights, r->across.most, r->side, r->rows + (pixel - r->first_row) * r->side * 3);
}

FOR_EVERY_PROCESSOR
static void go_down(const uint8_t *restrict from, const int32_t *restrict weights, int64_t count, int64_t values,
                    int32_t *restrict totals, uint8_t *restrict out) {
    for (int64_t v = 0; v < values; v++) totals[v] = 1 << (PRECISION - 1);
    for (int64_t k = 0; k < count; k++, from += values)
        for (int64_t v = 0; v < values; v++) totals[v] += weights[k] * from[v];
    for (int64_t v = 0; v < values; v++) out[v] = rounded(totals[v]);
}

/* The output, when all rows were there. */
void resampler_finish(Resampler *r) {
    const int64_t values = r->side * 3;
    for (int64_t i = 0; i < r->side; i++)
        go_down(r->rows + (r->down.first[i] - r->first_row) * values, r->down.weights + i * r->down.most,
                r->down.count[i], values, r->totals, r->out + i * values);
}

void resampler_close(Resampler *r) {
    taps_close(&r->down);
    taps_close(&r->across);
    free(r->memory);
}
