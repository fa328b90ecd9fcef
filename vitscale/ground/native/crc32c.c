/* CRC-32C (Castagnoli), the checksum of every stored image: by the instruction that x86 has for it, or by tables. */
#include <string.h>

#include "images.h"

#define POLYNOMIAL 0x82F63B78u /* Castagnoli, bits reversed */

static uint32_t tables[8][256]; /* row k advances the CRC of one byte by k further zero bytes */

__attribute__((constructor)) static void fill_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = crc;
    }
    for (int row = 1; row < 8; row++)
        for (int byte = 0; byte < 256; byte++)
            tables[row][byte] = (tables[row - 1][byte] >> 8) ^ tables[0][tables[row - 1][byte] & 0xFF];
}

static uint32_t by_bytes(uint32_t crc, const uint8_t *data, uint64_t size) {
    for (uint64_t i = 0; i < size; i++) crc = tables[0][(crc ^ data[i]) & 0xFF] ^ (crc >> 8);
    return crc;
}

/* Slicing by 8, on processors of any byte order. Exported for its test. */
uint32_t vitscale_crc32c_by_tables(const uint8_t *data, uint64_t size) {
    uint32_t crc = 0xFFFFFFFFu;
    for (; size >= 8; data += 8, size -= 8) {
        const uint8_t low[4] = {data[0] ^ (uint8_t)crc, data[1] ^ (uint8_t)(crc >> 8), data[2] ^ (uint8_t)(crc >> 16),
                                data[3] ^ (uint8_t)(crc >> 24)};
        crc = tables[7][low[0]] ^ tables[6][low[1]] ^ tables[5][low[2]] ^ tables[4][low[3]] ^ tables[3][data[4]] ^
              tables[2][data[5]] ^ tables[1][data[6]] ^ tables[0][data[7]];
    }
    return by_bytes(crc, data, size) ^ 0xFFFFFFFFu;
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("sse4.2"))) static uint32_t by_instruction(const uint8_t *data, uint64_t size) {
    uint64_t crc = 0xFFFFFFFFu;
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        crc = __builtin_ia32_crc32di(crc, word);
    }
    return by_bytes((uint32_t)crc, data, size) ^ 0xFFFFFFFFu;
}

uint32_t vitscale_crc32c(const uint8_t *data, uint64_t size) {
    return __builtin_cpu_supports("sse4.2") ? by_instruction(data, size) : vitscale_crc32c_by_tables(data, size);
}
#else
uint32_t vitscale_crc32c(const uint8_t *data, uint64_t size) { return vitscale_crc32c_by_tables(data, size); }
#endif
