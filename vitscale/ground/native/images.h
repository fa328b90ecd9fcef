/* What the files of this library know of each other, and what Python calls (vitscale/ground/native/__init__.py says how).
 *
 * Nothing is kept between calls; all functions are safe in threads. Nothing is read beyond the bytes that a caller
 * states, and nothing is written beyond the height, width or side that it states, whatever the bytes say.
 */
#ifndef VITSCALE_IMAGES_H
#define VITSCALE_IMAGES_H

#include <stddef.h>
#include <stdint.h>

enum { OK = 0, CRC_MISMATCH = 1, REFUSED = 2, WRONG_SIZE = 3, NO_MEMORY = 4 }; /* as in vitscale/ground/images.py */

/* Sanitizers do not take functions that are chosen while a program is loaded. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

/* ------------------------------------------------------------------------------------------------------- resizing */

typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t Places __attribute__((vector_size(32)));

/* Of two vectors of eight: the lower halves of both; the upper half of one, twice. */
#ifdef __clang__
#define LOWER_HALVES(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define UPPER_HALF(a) __builtin_shufflevector(a, a, 4, 5, 6, 7, 4, 5, 6, 7)
#else
#define LOWER_HALVES(a, b) __builtin_shuffle(a, b, (Places){0, 1, 2, 3, 8, 9, 10, 11})
#define UPPER_HALF(a) __builtin_shuffle(a, (Places){4, 5, 6, 7, 4, 5, 6, 7})
#endif

/* One axis. Output pixel i of `side` covers, in units of 1 / side of an original pixel, the `length` units from
 * start * side + i * length on; a source pixel covers `step` = side * scale units (scale: of the decoder, 1 to 8). */
typedef struct {
    int64_t start, length, side, step;
} Axis;

Axis axis_of(int64_t start, int64_t length, int64_t side, int64_t scale);
int64_t first_pixel(const Axis *axis, int64_t output);
int64_t end_pixel(const Axis *axis, int64_t output);

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

/* A region begins at source column `left` and is `width` pixels wide. Returns 0 where there is no memory. */
int resizer_open(Resizer *r, Axis rows, Axis columns, int64_t left, int64_t width, int flip, uint8_t *out);
void resizer_take(Resizer *r, int64_t pixel, const uint8_t *row); /* the next row; its number in the source */
void resizer_close(Resizer *r);

/* A part of a picture of height x width pixels as (side, side, 3), and how it is shown. */
typedef struct {
    int64_t height, width, top, left, box_height, box_width, flip, side, resize;
    uint8_t *out;
} View;

enum { AREA, TF_BILINEAR, PIL_BILINEAR, PIL_BICUBIC }; /* how it is resized; as in vitscale/ground/images.py */

/* ----------------------------------------------------------------------------------------- resizing by other kernels */

/* Of one axis: which pixels each of `side` output pixels is made of, and their weights (side, most). */
typedef struct {
    int64_t most, *first, *count;
    int32_t *weights;
} Taps;

/* Takes the rows [first_row, end_row) of the columns [first_column, end_column), gives the output at the end. */
typedef struct {
    Taps down, across;
    int64_t side, first_row, end_row, first_column, end_column;
    Places *weights; /* across, of pairs of output columns (pairs, most): four times one's, four times the other's */
    int64_t *first;  /* (2 * pairs): value of `line` at which an output column begins */
    int32_t *line;   /* a row, and zeros that the last columns' spare taps may touch */
    uint8_t *rows;   /* (end_row - first_row, side, 3), and spare room: resized across, not yet down */
    int32_t *totals; /* of an output row */
    uint8_t *out;    /* (side, side, 3) */
    void *memory;
} Resampler;

int resampler_open(Resampler *r, const View *view); /* a zeroed one; returns 0 where there is no memory */
void resampler_take(Resampler *r, int64_t pixel, const uint8_t *row); /* the next row; its number in the picture */
void resampler_finish(Resampler *r);
void resampler_close(Resampler *r);

/* --------------------------------------------------------------------------------- several views of a picture at once */

/* Rows and columns of a picture, ends excluded. */
typedef struct {
    int64_t first_row, end_row, first_column, end_column;
} Region;

/* A view in the making. Zeroed but for its view before it is opened. */
typedef struct {
    View view;
    Region needs;
    Resizer resizer;
    Resampler resampler;
} Sink;

/* The views of one picture, which its rows are given to one after the other; `scale` is the decoder's. */
typedef struct {
    Sink *sinks;
    int64_t count;
    Region needs; /* what they need together */
} Sinks;

int sinks_open(Sinks *all, int64_t scale); /* returns 0 where there is no memory */
void sinks_take(Sinks *all, int64_t row, const uint8_t *pixels); /* of a row, from column needs.first_column on */
void sinks_close(Sinks *all, int are_complete);

/* ------------------------------------------------------------------------------------------------ what Python calls */

/* A JPEG's header as its decoder reads it. `marker`: second byte of the start of frame, 0 if none was found, else with
 * bits a component and size in pixels (0 where the kind of frame is one that libjpeg does not read). */
typedef struct {
    int32_t marker, precision, height, width;
    int32_t has_exif;     /* an APP1 segment, which may hold EXIF or XMP data */
    int32_t two_frames;   /* refused for that */
    int32_t is_endless;   /* refused for its number of segments */
} Header;

/* One operation on a decoded picture; operations.c lists them. Its values are between -32768 and 32768. */
typedef struct {
    int32_t code, interpolation, fill[3], spare;
    double values[6];
} Instruction;

int vitscale_operate(uint8_t *images, int64_t count, int64_t side, const Instruction *programs, int64_t length,
                     const int32_t *status);
int vitscale_header(const uint8_t *jpeg, uint64_t size, Header *header);
int vitscale_decode(const uint8_t *jpeg, uint64_t size, int64_t height, int64_t width, int exact, uint8_t *out);
int vitscale_encode(const uint8_t *rgb, int64_t height, int64_t width, int quality, uint8_t *out, uint64_t *size);
int views_of_jpeg(const uint8_t *jpeg, uint64_t size, int may_scale, Sinks *all);
uint32_t vitscale_crc32c(const uint8_t *data, uint64_t size);

#endif
