/* JPEGs by libjpeg-turbo: what a header says, whether a file is good, its pixels whole or in part, and writing them.
 *
 * There is one way into the decoder, `open_jpeg`, and one rule: an image is good if it has the stated size, is coded by
 * Huffman's method, turns into RGB, and is decoded to its end without any warning. A view of a part sees only what it
 * needs: rows above a crop are entropy-decoded only, columns beside it are not transformed, rows below it are not looked
 * at. Several views are cut from one decoding, of what they need together. No view of a good image is refused, and
 * one that reaches the last row has the verdict of the whole.
 *
 * The settings are those of stock FFCV (fast DCT, fancy upsampling): what is decoded here equals, bit for bit, the same
 * part of the whole picture as FFCV decodes it.
 */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <jerror.h>
#include <jpeglib.h>

#include "images.h"

enum { HIERARCHICAL = 0xDE, JPEG_LS = 0xF7 }; /* DHP, SOF55: markers of frames that libjpeg has no name for */
enum { ROWS_A_CALL = 8 };
enum { MAX_SEGMENTS = 10000 }; /* of a header; profiles of 16 MB have 255 */
/* Each goes over all pixels, in a few bytes if it likes. Files that programs write have about 10; libjpeg-turbo's own
 * limit for files from strangers is the same. */
enum { MAX_SCANS = 500 };
/* Of a file in several scans; vitscale/ground/files/unpacked.py has the same limits for files of all formats. */
enum { SMALL_PICTURE = 1 << 24, MOST_PIXELS_A_BYTE = 180 };

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf leave;
    int is_strict; /* whether a warning ends it */
    int segments;  /* of the header so far; -1 when it is read */
    Header *header;
} Errors;

static void leave(j_common_ptr codec) {
    longjmp(((Errors *)codec->err)->leave, codec->err->msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : REFUSED);
}

/* libjpeg tells of each segment that it has read, at level 1. */
static void note(j_common_ptr codec, int level) {
    Errors *errors = (Errors *)codec->err;
    const int *told = errors->base.msg_parm.i;
    if (level < 0) {
        errors->base.num_warnings++;
        /* Where a file ends, libjpeg goes on with bytes of its own, from which a frame would be read as well. */
        if (errors->is_strict || errors->base.msg_code == JWRN_JPEG_EOF) leave(codec);
    }
    if (level != 1 || errors->segments < 0) return;
    if (errors->base.msg_code == JTRC_SOF && errors->header && !errors->header->marker) {
        errors->header->marker = told[0];
        errors->header->precision = ((j_decompress_ptr)codec)->data_precision;
        errors->header->width = told[1];
        errors->header->height = told[2];
    }
    if (errors->base.msg_code == JTRC_MISC_MARKER && told[0] == JPEG_APP0 + 1 && errors->header)
        errors->header->has_exif = 1;
    if (++errors->segments > MAX_SEGMENTS) {
        if (errors->header) errors->header->is_endless = 1;
        leave(codec);
    }
}
static void say_nothing(j_common_ptr codec) { (void)codec; }

static struct jpeg_error_mgr *errors_of(Errors *errors) {
    jpeg_std_error(&errors->base);
    errors->base.error_exit = leave;
    errors->base.emit_message = note;
    errors->base.output_message = say_nothing;
    return &errors->base;
}

/* The only place that libjpeg's errors come back to. What they find as it was lies in the frames of the callers. */
static int guarded(Errors *errors, int (*work)(void *), void *job) {
    switch (setjmp(errors->leave)) {
        case 0: return work(job);
        case NO_MEMORY: return NO_MEMORY;
        default: return REFUSED;
    }
}

/* ------------------------------------------------------------------------------------------------------- decoding */

typedef struct {
    struct jpeg_decompress_struct decoder;
    Errors errors;
    struct jpeg_progress_mgr progress;
    const uint8_t *jpeg;
    uint64_t size;
    int64_t height, width;
    int exact, may_scale;
    Sinks *all;
    uint8_t *out;
    uint8_t *rows;
} Job;

static int finish(Job *job, int (*work)(void *)) {
    job->decoder.err = errors_of(&job->errors);
    const int status = guarded(&job->errors, work, job);
    jpeg_destroy_decompress(&job->decoder);
    free(job->rows);
    return status;
}

static void read_header(Job *job) {
    struct jpeg_decompress_struct *decoder = &job->decoder;
    jpeg_create_decompress(decoder);
    jpeg_mem_src(decoder, job->jpeg, (unsigned long)job->size);
    jpeg_read_header(decoder, TRUE);
    job->errors.segments = -1;
}

static void limit_scans(j_common_ptr decoder) {
    if (((j_decompress_ptr)decoder)->input_scan_number > MAX_SCANS) leave(decoder);
}

/* Everything before the first row. */
static int open_jpeg(Job *job) {
    struct jpeg_decompress_struct *decoder = &job->decoder;
    read_header(job);
    if ((int64_t)decoder->image_height != job->height || (int64_t)decoder->image_width != job->width) return WRONG_SIZE;
    /* Arithmetic coding is a matter of how libjpeg-turbo was built: no other machine would have to read it. */
    if (job->errors.base.num_warnings || decoder->arith_code) return REFUSED;
    /* Several scans take six bytes for each pixel before the first row, and a file of 500 bytes may have them. */
    const int64_t pixels = job->height * job->width;
    if (jpeg_has_multiple_scans(decoder) && pixels > SMALL_PICTURE && pixels / MOST_PIXELS_A_BYTE > (int64_t)job->size)
        return REFUSED;
    job->errors.is_strict = 1;
    job->progress.progress_monitor = limit_scans;
    decoder->progress = &job->progress;
    decoder->out_color_space = JCS_RGB;
    decoder->dct_method = job->exact ? JDCT_ISLOW : JDCT_IFAST;
    return OK;
}

static int decode_whole(void *what) {
    Job *job = what;
    struct jpeg_decompress_struct *decoder = &job->decoder;
    const int status = open_jpeg(job);
    if (status != OK) return status;
    jpeg_start_decompress(decoder);
    const uint64_t row_bytes = (uint64_t)decoder->output_width * 3;
    if (!job->out && !(job->rows = malloc(row_bytes * ROWS_A_CALL))) return NO_MEMORY;
    while (decoder->output_scanline < decoder->output_height) {
        JSAMPROW pointers[ROWS_A_CALL];
        JDIMENSION count = decoder->output_height - decoder->output_scanline;
        if (count > ROWS_A_CALL) count = ROWS_A_CALL;
        uint8_t *first = job->out ? job->out + row_bytes * decoder->output_scanline : job->rows;
        for (JDIMENSION i = 0; i < count; i++) pointers[i] = first + row_bytes * i;
        jpeg_read_scanlines(decoder, pointers, count);
    }
    jpeg_finish_decompress(decoder);
    return OK;
}

/* How often the decoder may halve a picture, so that every view's box keeps `side` pixels each way. */
static int64_t largest_scale(const Sinks *all) {
    int64_t scale = 8;
    for (int64_t i = 0; i < all->count; i++) {
        const View *view = &all->sinks[i].view;
        if (view->resize != AREA) return 1;
        while (scale > 1 && (view->box_height < scale * view->side || view->box_width < scale * view->side)) scale /= 2;
    }
    return scale;
}

/* Whether scans of a progressive file are missing. Then the decoder smooths blocks by their neighbours, which have to be there. */
static int is_smoothed(const struct jpeg_decompress_struct *decoder) {
    if (!decoder->progressive_mode || !decoder->coef_bits) return 0;
    for (int component = 0; component < decoder->num_components; component++)
        for (int k = 1; k < DCTSIZE2; k++)
            if (decoder->coef_bits[component][k] != 0) return 1;
    return 0;
}

static int decode_views(void *what) {
    Job *job = what;
    struct jpeg_decompress_struct *decoder = &job->decoder;
    const int status = open_jpeg(job);
    if (status != OK) return status;
    const int64_t scale = job->may_scale ? largest_scale(job->all) : 1;
    decoder->scale_num = 1, decoder->scale_denom = (unsigned)scale;
    jpeg_start_decompress(decoder);
    if (!sinks_open(job->all, scale)) return NO_MEMORY;

    const Region *needs = &job->all->needs;
    /* Upsampling of colour looks at one neighbour, which is two pixels: with them the edges are those of the picture. */
    JDIMENSION from = needs->first_column > 2 ? (JDIMENSION)needs->first_column - 2 : 0;
    JDIMENSION count = decoder->output_width - from;
    if ((int64_t)count > needs->end_column + 2 - (int64_t)from) count = (JDIMENSION)(needs->end_column + 2) - from;
    if (is_smoothed(decoder)) from = 0, count = decoder->output_width;
    if (count < decoder->output_width) jpeg_crop_scanline(decoder, &from, &count);

    const uint64_t row_bytes = (uint64_t)decoder->output_width * 3;
    const uint64_t skipped_bytes = (uint64_t)(needs->first_column - (int64_t)from) * 3;
    job->rows = malloc(row_bytes * ROWS_A_CALL);
    if (!job->rows) return NO_MEMORY;
    JSAMPROW pointers[ROWS_A_CALL];
    for (uint64_t i = 0; i < ROWS_A_CALL; i++) pointers[i] = job->rows + row_bytes * i;
    if (needs->first_row > 0) jpeg_skip_scanlines(decoder, (JDIMENSION)needs->first_row);
    while ((int64_t)decoder->output_scanline < needs->end_row) {
        const int64_t row = decoder->output_scanline, wanted = needs->end_row - row;
        const int read =
            (int)jpeg_read_scanlines(decoder, pointers, wanted < ROWS_A_CALL ? (JDIMENSION)wanted : ROWS_A_CALL);
        for (int i = 0; i < read; i++) sinks_take(job->all, row + i, pointers[i] + skipped_bytes);
    }
    if (decoder->output_scanline == decoder->output_height) jpeg_finish_decompress(decoder);
    return OK;
}

static int only_header(void *what) {
    Job *job = what;
    read_header(job);
    return OK;
}

/* Damage after the start of frame does not matter here. Returns OK, whatever was found, or NO_MEMORY. */
int vitscale_header(const uint8_t *jpeg, uint64_t size, Header *header) {
    Job job = {.jpeg = jpeg, .size = size, .errors.header = header};
    *header = (Header){0};
    const int status = finish(&job, only_header);
    if (status != REFUSED) return status;
    const int code = job.errors.base.msg_code, marker = job.errors.base.msg_parm.i[0];
    header->two_frames = code == JERR_SOF_DUPLICATE;
    const int is_other_kind = code == JERR_UNKNOWN_MARKER && (marker == HIERARCHICAL || marker == JPEG_LS);
    if (!header->marker && (code == JERR_SOF_UNSUPPORTED || is_other_kind)) header->marker = marker;
    return OK;
}

/* A JPEG of this size as uint8 (height, width, 3) RGB, by the exact DCT or the fast one; only its status if `out` is NULL.
 *
 * Returns OK; WRONG_SIZE if the JPEG says another size; NO_MEMORY; REFUSED for anything else. */
int vitscale_decode(const uint8_t *jpeg, uint64_t size, int64_t height, int64_t width, int exact, uint8_t *out) {
    Job job = {.jpeg = jpeg, .size = size, .height = height, .width = width, .exact = exact, .out = out};
    return finish(&job, decode_whole);
}

/* Views whose boxes lie in the picture, from one decoding of it; returns as `vitscale_decode`. The caller closes them.
 *
 * With `may_scale` the decoder halves the picture up to three times, as long as each box keeps `side` pixels each way. */
int views_of_jpeg(const uint8_t *jpeg, uint64_t size, int may_scale, Sinks *all) {
    const View *first = &all->sinks[0].view;
    Job job = {.jpeg = jpeg, .size = size, .height = first->height, .width = first->width};
    job.may_scale = may_scale, job.all = all;
    return finish(&job, decode_views);
}

/* -------------------------------------------------------------------------------------------------------- writing */

typedef struct {
    struct jpeg_compress_struct encoder;
    Errors errors;
    struct jpeg_destination_mgr target;
    const uint8_t *rgb;
    int64_t height, width;
    int quality;
    uint8_t *out;
    uint64_t room, size;
} Writing;

static void begin_file(j_compress_ptr encoder) { (void)encoder; }
static boolean refuse_more(j_compress_ptr encoder) {
    leave((j_common_ptr)encoder);
    return FALSE;
}
static void end_file(j_compress_ptr encoder) { (void)encoder; }

static int write_jpeg(void *what) {
    Writing *job = what;
    struct jpeg_compress_struct *encoder = &job->encoder;
    jpeg_create_compress(encoder);
    job->target = (struct jpeg_destination_mgr){job->out, job->room, begin_file, refuse_more, end_file};
    encoder->dest = &job->target;
    encoder->image_height = (JDIMENSION)job->height, encoder->image_width = (JDIMENSION)job->width;
    encoder->in_color_space = JCS_RGB, encoder->input_components = 3;
    jpeg_set_defaults(encoder);
    jpeg_set_quality(encoder, job->quality, TRUE);
    encoder->comp_info[0].h_samp_factor = encoder->comp_info[0].v_samp_factor = 1; /* chroma as fine as luma */
    encoder->dct_method = JDCT_ISLOW;
    jpeg_start_compress(encoder, TRUE);
    while (encoder->next_scanline < encoder->image_height) {
        JSAMPROW row = (JSAMPROW)(uintptr_t)(job->rgb + (uint64_t)encoder->next_scanline * (uint64_t)job->width * 3);
        jpeg_write_scanlines(encoder, &row, 1);
    }
    jpeg_finish_compress(encoder);
    job->size = job->room - job->target.free_in_buffer;
    return OK;
}

/* A baseline JPEG without metadata into `out`, which has room for *size bytes; *size becomes what it takes.
 *
 * Returns OK; REFUSED for sides that a JPEG cannot have, or too little room; NO_MEMORY. */
int vitscale_encode(const uint8_t *rgb, int64_t height, int64_t width, int quality, uint8_t *out, uint64_t *size) {
    if (height < 1 || width < 1 || height > JPEG_MAX_DIMENSION || width > JPEG_MAX_DIMENSION) return REFUSED;
    Writing job = {.rgb = rgb, .height = height, .width = width, .quality = quality, .out = out, .room = *size};
    job.encoder.err = errors_of(&job.errors);
    const int status = guarded(&job.errors, write_jpeg, &job);
    jpeg_destroy_compress(&job.encoder);
    *size = job.size;
    return status;
}

/* Of the decoder, 2001005 for 2.1.5: another one may round otherwise. */
int vitscale_libjpeg_turbo_version(void) { return LIBJPEG_TURBO_VERSION_NUMBER; }
