/* One view of one stored picture: the rows and columns of a JPEG that a crop needs, decoded, averaged to the model's
 * input size and flipped, in one pass that holds a few rows at a time.
 *
 * Decoding is libjpeg-turbo's with the settings of stock FFCV (fast DCT, fancy upsampling): what is decoded here equals,
 * bit for bit, the same part of the whole picture. Rows above a crop are entropy-decoded only, columns beside it are
 * not transformed, rows below it are not looked at.
 *
 * Resizing is the mean over the area that an output pixel covers, in both directions, whether that is many source pixels
 * or a part of one (OpenCV's INTER_AREA, but for pictures that shrink one way and grow the other, where OpenCV takes two
 * neighbours only). Sums over rows are whole numbers below 2^24, hence exact in float32; sums over columns are taken in
 * one order by plain multiplications and additions (no fused ones: -ffp-contract=off). So every processor gives the same
 * bits, with or without wide vectors.
 *
 * Nothing is kept between calls; all functions are safe in threads.
 */
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jerror.h>
#include <jpeglib.h>

enum { OK = 0, REFUSED = 2, WRONG_SIZE = 3, NO_MEMORY = 4 }; /* as in kernel.py */
enum { ROWS_A_CALL = 8 };

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t Places __attribute__((vector_size(32)));
#ifdef __clang__
#define LOWER_HALVES(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define UPPER_HALF(a) __builtin_shufflevector(a, a, 4, 5, 6, 7, 4, 5, 6, 7)
#else
#define LOWER_HALVES(a, b) __builtin_shuffle(a, b, (Places){0, 1, 2, 3, 8, 9, 10, 11})
#define UPPER_HALF(a) __builtin_shuffle(a, (Places){4, 5, 6, 7, 4, 5, 6, 7})
#endif

/* ------------------------------------------------------------------------------------------------------- resizing */

/* One axis. Output pixel i of `side` covers, in units of 1 / side of an original pixel, the `length` units from
 * start * side + i * length on; a source pixel covers `step` = side * scale units (scale: of the decoder, 1 to 8). */
typedef struct {
    int64_t start, length, side, step;
} Axis;

static Axis axis_of(int64_t start, int64_t length, int64_t side, int64_t scale) {
    return (Axis){start * side, length, side, side * scale};
}
static int64_t first_pixel(const Axis *axis, int64_t output) { return (axis->start + output * axis->length) / axis->step; }
static int64_t end_pixel(const Axis *axis, int64_t output) { /* one past the last */
    return (axis->start + (output + 1) * axis->length + axis->step - 1) / axis->step;
}
static int64_t overlap(const Axis *axis, int64_t output, int64_t pixel) {
    int64_t low = axis->start + output * axis->length, high = low + axis->length;
    int64_t from = pixel * axis->step, to = from + axis->step;
    if (from > low) low = from;
    if (to < high) high = to;
    return high > low ? high - low : 0;
}

/* Takes the rows of a region one after the other, gives the rows of the output. */
typedef struct {
    Axis rows, columns;
    int64_t values;            /* of a row of the region: 3 times its pixels */
    int64_t output_row;        /* that is being summed, of source pixels [first_row, end_row) */
    int64_t first_row, end_row;
    int taps;
    int32_t *first;            /* (2 * pairs): value at which an output column begins; pairs: half of side, rounded up */
    Lanes *weights;            /* (pairs, taps): four times that of one column, four times that of the next */
    float *means;              /* of an output row (6 * pairs, and spare room) */
    float *sums;               /* (values, and zeros that the last columns' spare taps and lanes may touch) */
    uint8_t *out;              /* (side, side, 3) */
    void *memory;
} Resizer;

static void resizer_begin_row(Resizer *r, int64_t row) {
    r->output_row = row;
    r->first_row = first_pixel(&r->rows, row);
    r->end_row = end_pixel(&r->rows, row);
}

/* A region begins at source column `left` and is `width` pixels wide. Returns 0 where there is no memory. */
static int resizer_open(Resizer *r, Axis rows, Axis columns, int64_t left, int64_t width, int flip, uint8_t *out) {
    /* No output column touches more pixels than these; those that touch fewer have weights of zero. */
    const int64_t side = columns.side, taps = (columns.length + columns.step - 1) / columns.step + 1;
    const int64_t pairs = (side + 1) / 2, sums = (3 * (width + taps) + 8 + 7) & ~7, means = (6 * pairs + 8 + 7) & ~7;
    r->memory = calloc((size_t)(8 * pairs * taps + sums + means + 2 * pairs + 8), 4);
    if (!r->memory) return 0;
    r->rows = rows, r->columns = columns, r->values = 3 * width, r->taps = (int)taps, r->out = out;
    r->weights = (Lanes *)(((uintptr_t)r->memory + 31) & ~(uintptr_t)31);
    r->sums = (float *)(r->weights + pairs * taps);
    r->means = r->sums + sums;
    r->first = (int32_t *)(r->means + means);
    const float whole = (float)((double)rows.length * (double)columns.length);
    for (int64_t i = 0; i < side; i++) {
        const int64_t column = flip ? side - 1 - i : i, first = first_pixel(&columns, column);
        r->first[i] = (int32_t)(3 * (first - left));
        for (int64_t tap = 0; tap < taps; tap++) {
            const float weight = (float)overlap(&columns, column, first + tap) / whole;
            for (int lane = 0; lane < 4; lane++) r->weights[i / 2 * taps + tap][4 * (i % 2) + lane] = weight;
        }
    }
    resizer_begin_row(r, 0);
    return 1;
}

FOR_EVERY_PROCESSOR
static void begin_sums(float *restrict sums, const uint8_t *restrict row, float weight, int64_t values) {
    for (int64_t i = 0; i < values; i++) sums[i] = weight * (float)row[i];
}

FOR_EVERY_PROCESSOR
static void add_to_sums(float *restrict sums, const uint8_t *restrict row, float weight, int64_t values) {
    for (int64_t i = 0; i < values; i++) sums[i] += weight * (float)row[i];
}

/* Two pixels at a time, four lanes each: three values, and one that does not matter. What is read and written too much
 * lies in spare room, or is replaced by the next pixels. */
#define MEANS_OF(TAPS)                                                                                \
    for (int64_t i = 0; i < side; i += 2) {                                                           \
        const float *one = sums + first[i], *other = sums + first[i + 1];                             \
        Lanes total = {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f};                               \
        for (int tap = 0; tap < (TAPS); tap++, one += 3, other += 3, weights++) {                     \
            Lanes a, b;                                                                               \
            memcpy(&a, one, sizeof a);                                                                \
            memcpy(&b, other, sizeof b);                                                              \
            total += LOWER_HALVES(a, b) * *weights;                                                   \
        }                                                                                             \
        const Lanes second = UPPER_HALF(total);                                                       \
        memcpy(means + 3 * i, &total, sizeof total);                                                  \
        memcpy(means + 3 * i + 3, &second, sizeof second);                                            \
    }

FOR_EVERY_PROCESSOR
static void finish_row(const float *restrict sums, const int32_t *restrict first, const Lanes *restrict weights, int taps,
                       int64_t side, float *restrict means, uint8_t *restrict out) {
    switch (taps) { /* the usual ones with a known end */
        case 2: MEANS_OF(2) break;
        case 3: MEANS_OF(3) break;
        case 4: MEANS_OF(4) break;
        default: MEANS_OF(taps)
    }
    for (int64_t i = 0; i < 3 * side; i++) out[i] = (uint8_t)(int32_t)means[i];
}

/* The next row of the region; `pixel` is its number in the source. */
static void resizer_take(Resizer *r, int64_t pixel, const uint8_t *row) {
    const int64_t side = r->rows.side;
    while (r->output_row < side && pixel >= r->first_row) {
        const float weight = (float)overlap(&r->rows, r->output_row, pixel);
        if (pixel == r->first_row)
            begin_sums(r->sums, row, weight, r->values);
        else
            add_to_sums(r->sums, row, weight, r->values);
        if (pixel + 1 < r->end_row) return;
        finish_row(r->sums, r->first, r->weights, r->taps, side, r->means, r->out + r->output_row * side * 3);
        resizer_begin_row(r, r->output_row + 1);
    }
}

static void resizer_close(Resizer *r) { free(r->memory); }

/* ------------------------------------------------------------------------------------------------------- decoding */

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf leave;
} Errors;

static void leave(j_common_ptr decoder) {
    longjmp(((Errors *)decoder->err)->leave, decoder->err->msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : REFUSED);
}
static void count_warning(j_common_ptr decoder, int level) {
    if (level < 0) decoder->err->num_warnings++;
}
static void say_nothing(j_common_ptr decoder) { (void)decoder; }

/* What one JPEG needs. It lies in the caller's frame, so that leaving in the middle of the decoder finds it as it was. */
typedef struct {
    struct jpeg_decompress_struct decoder;
    Errors errors;
    Resizer resizer;
    uint8_t *rows;
} Job;

typedef struct {
    int64_t height, width, top, left, box_height, box_width, flip, may_scale, side;
} View;

static int view_jpeg(Job *job, const uint8_t *jpeg, uint64_t size, const View *view, uint8_t *out) {
    struct jpeg_decompress_struct *decoder = &job->decoder;
    const int64_t side = view->side;
    switch (setjmp(job->errors.leave)) {
        case 0: break;
        case NO_MEMORY: return NO_MEMORY;
        default: return REFUSED;
    }
    jpeg_create_decompress(decoder);
    jpeg_mem_src(decoder, jpeg, (unsigned long)size);
    jpeg_read_header(decoder, TRUE);
    if ((int64_t)decoder->image_height != view->height || (int64_t)decoder->image_width != view->width)
        return WRONG_SIZE;
    int64_t scale = 1;
    if (view->may_scale)
        while (scale < 8 && view->box_height >= 2 * scale * side && view->box_width >= 2 * scale * side) scale *= 2;
    decoder->scale_num = 1, decoder->scale_denom = (unsigned)scale;
    decoder->out_color_space = JCS_RGB;
    decoder->dct_method = JDCT_IFAST;
    jpeg_start_decompress(decoder);

    const Axis down = axis_of(view->top, view->box_height, side, scale);
    const Axis across = axis_of(view->left, view->box_width, side, scale);
    const int64_t first_row = first_pixel(&down, 0), end_row = end_pixel(&down, side - 1);
    const int64_t first_column = first_pixel(&across, 0), end_column = end_pixel(&across, side - 1);
    /* Upsampling of colour looks at one neighbour, which is two pixels: with them the edges are those of the picture. */
    JDIMENSION from = first_column > 2 ? (JDIMENSION)first_column - 2 : 0;
    JDIMENSION count = decoder->output_width - from;
    if ((int64_t)count > end_column + 2 - (int64_t)from) count = (JDIMENSION)(end_column + 2) - from;
    if (count < decoder->output_width) jpeg_crop_scanline(decoder, &from, &count);

    const uint64_t row_bytes = (uint64_t)decoder->output_width * 3;
    const uint64_t skipped_bytes = (uint64_t)(first_column - (int64_t)from) * 3;
    job->rows = malloc(row_bytes * ROWS_A_CALL);
    if (!job->rows) return NO_MEMORY;
    JSAMPROW pointers[ROWS_A_CALL];
    for (int i = 0; i < ROWS_A_CALL; i++) pointers[i] = job->rows + row_bytes * i;
    if (!resizer_open(&job->resizer, down, across, first_column, end_column - first_column, view->flip != 0, out))
        return NO_MEMORY;
    if (first_row > 0) jpeg_skip_scanlines(decoder, (JDIMENSION)first_row);
    while ((int64_t)decoder->output_scanline < end_row) {
        const int64_t row = decoder->output_scanline, wanted = end_row - row;
        const int read =
            (int)jpeg_read_scanlines(decoder, pointers, wanted < ROWS_A_CALL ? (JDIMENSION)wanted : ROWS_A_CALL);
        for (int i = 0; i < read; i++) resizer_take(&job->resizer, row + i, pointers[i] + skipped_bytes);
    }
    return job->errors.base.num_warnings ? REFUSED : OK;
}

/* The view of a JPEG of `height` x `width` pixels on the box (top, left, box_height, box_width), as (side, side, 3).
 *
 * With `may_scale` the decoder halves the picture up to three times, as long as the box keeps `side` pixels each way.
 * Returns OK; REFUSED if the decoder cannot read it or warns; WRONG_SIZE if the JPEG says another size; NO_MEMORY. */
int vitscale_view_jpeg(const uint8_t *jpeg, uint64_t size, int64_t height, int64_t width, int64_t top, int64_t left,
                       int64_t box_height, int64_t box_width, int64_t flip, int64_t may_scale, uint8_t *out,
                       int64_t side) {
    const View view = {height, width, top, left, box_height, box_width, flip, may_scale, side};
    Job job = {.rows = NULL};
    job.decoder.err = jpeg_std_error(&job.errors.base);
    job.errors.base.error_exit = leave;
    job.errors.base.emit_message = count_warning;
    job.errors.base.output_message = say_nothing;
    const int status = view_jpeg(&job, jpeg, size, &view, out);
    jpeg_destroy_decompress(&job.decoder);
    resizer_close(&job.resizer);
    free(job.rows);
    return status;
}

/* The same of a picture that is stored as packed RGB rows. */
int vitscale_view_raw(const uint8_t *pixels, uint64_t size, int64_t height, int64_t width, int64_t top, int64_t left,
                      int64_t box_height, int64_t box_width, int64_t flip, uint8_t *out, int64_t side) {
    if (size != (uint64_t)height * (uint64_t)width * 3) return WRONG_SIZE;
    Axis down = axis_of(top, box_height, side, 1), across = axis_of(left, box_width, side, 1);
    Resizer resizer;
    if (!resizer_open(&resizer, down, across, left, box_width, flip != 0, out)) return NO_MEMORY;
    for (int64_t row = top; row < top + box_height; row++)
        resizer_take(&resizer, row, pixels + (row * width + left) * 3);
    resizer_close(&resizer);
    return OK;
}

/* Of these functions; view.py expects the same. */
int vitscale_view_version(void) { return 2; }

/* Of the decoder, 2001005 for 2.1.5: another one may round otherwise. */
int vitscale_libjpeg_turbo_version(void) { return LIBJPEG_TURBO_VERSION_NUMBER; }
