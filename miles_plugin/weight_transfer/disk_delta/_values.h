/* What `_sparse.c` does to values of 1, 2, 4 or 8 bytes. Nothing here knows Python.
 *
 * Sizes of buffers were compared by the caller; indices that are in them are checked here, before they are used. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define GROUP 64  /* values that are compared together */
#define SLACK 4   /* positions that may be written behind the last */
#define ESCAPE 15 /* the nibble of a difference that no nibble holds */
#define MORE 255  /* the symbol of a gap that goes on */

/* `work` with a constant width, so that each width is compiled by itself; 0 for another. */
#define FOR_WIDTH(width, work, ...)                                                                                    \
    ((width) == 1   ? work(1, __VA_ARGS__)                                                                             \
     : (width) == 2 ? work(2, __VA_ARGS__)                                                                             \
     : (width) == 4 ? work(4, __VA_ARGS__)                                                                             \
     : (width) == 8 ? work(8, __VA_ARGS__)                                                                             \
                    : 0)

INLINE uint64_t load(const char *at, size_t width)
{
    uint8_t one;
    uint16_t two;
    uint32_t four;
    uint64_t eight;
    switch (width) {
    case 1: memcpy(&one, at, 1); return one;
    case 2: memcpy(&two, at, 2); return two;
    case 4: memcpy(&four, at, 4); return four;
    default: memcpy(&eight, at, 8); return eight;
    }
}

INLINE void store(char *at, uint64_t value, size_t width)
{
    uint8_t one = (uint8_t)value;
    uint16_t two = (uint16_t)value;
    uint32_t four = (uint32_t)value;
    switch (width) {
    case 1: memcpy(at, &one, 1); break;
    case 2: memcpy(at, &two, 2); break;
    case 4: memcpy(at, &four, 4); break;
    default: memcpy(at, &value, 8);
    }
}

/* after - before as a number of `width` bytes with a sign, small ones of either sign first: 0, -1, 1, -2, 2 ... */
INLINE uint64_t zigzag(uint64_t before, uint64_t after, size_t width)
{
    unsigned unused = 64 - 8 * (unsigned)width;
    int64_t difference = (int64_t)((after - before) << unused) >> unused;
    return ((uint64_t)difference << 1) ^ (uint64_t)(difference >> 63);
}

INLINE uint64_t unzigzag(uint64_t coded)
{
    return (coded >> 1) ^ (0 - (coded & 1));
}

#define COMPARE(type)                                                                                                  \
    for (int j = 0; j < GROUP; j++) {                                                                                  \
        type x, y;                                                                                                     \
        memcpy(&x, old + j * sizeof x, sizeof x);                                                                      \
        memcpy(&y, new + j * sizeof y, sizeof y);                                                                      \
        differs[j] = x != y;                                                                                           \
    }

/* Bit j says that value j of GROUP differs. Plain loops: compilers make vector instructions of them. */
INLINE uint64_t differing(const char *old, const char *new, size_t width)
{
    uint8_t differs[GROUP];
    uint64_t mask = 0;
    switch (width) {
    case 1: COMPARE(uint8_t) break;
    case 2: COMPARE(uint16_t) break;
    case 4: COMPARE(uint32_t) break;
    default: COMPARE(uint64_t)
    }
    for (int byte = 0; byte < GROUP / 8; byte++) { /* the multiplication moves bit 0 of eight bytes into the highest */
        uint64_t eight;
        memcpy(&eight, differs + 8 * byte, 8);
        mask |= ((eight * 0x0102040810204080u) >> 56) << (8 * byte);
    }
    return mask;
}

#ifdef __SSE2__
INLINE __m128i same(const char *old, const char *new, size_t at, size_t width)
{
    __m128i x = _mm_loadu_si128((const __m128i *)(old + at)), y = _mm_loadu_si128((const __m128i *)(new + at));
    return width == 1 ? _mm_cmpeq_epi8(x, y) : width == 2 ? _mm_cmpeq_epi16(x, y) : _mm_cmpeq_epi32(x, y);
}

/* The same in half the time, for it has an instruction that makes bits of bytes. */
INLINE uint64_t differing_quick(const char *old, const char *new, size_t width)
{
    uint64_t mask = 0;
    if (width == 8)
        return differing(old, new, width);
    for (size_t i = 0; i < GROUP; i += 16) {
        __m128i bytes = same(old, new, i * width, width);
        if (width == 2)
            bytes = _mm_packs_epi16(bytes, same(old, new, i * width + 16, width));
        if (width == 4)
            bytes = _mm_packs_epi16(_mm_packs_epi32(bytes, same(old, new, i * width + 16, width)),
                                    _mm_packs_epi32(same(old, new, i * width + 32, width),
                                                    same(old, new, i * width + 48, width)));
        mask |= (uint64_t)(uint16_t)_mm_movemask_epi8(bytes) << i;
    }
    return ~mask;
}
#else
#define differing_quick differing
#endif

/* Room for `count` + SLACK positions was checked by the caller. */
INLINE size_t find_changes(size_t width, const char *old, const char *new, size_t count, uint32_t *out)
{
    uint32_t *at = out;
    size_t i = 0;
    for (; i + GROUP <= count; i += GROUP) {
        uint64_t mask = differing_quick(old + i * width, new + i * width, width);
        if (mask == 0)
            continue;
        uint32_t *end = at + __builtin_popcountll(mask);
        /* Most groups have few: so many are written whether they are there or not, which no branch has to guess. */
        for (int j = 0; j < SLACK; j++) {
            at[j] = (uint32_t)i + (uint32_t)__builtin_ctzll(mask | (uint64_t)1 << 63);
            mask &= mask - 1;
        }
        for (at += SLACK; at < end; at++) {
            *at = (uint32_t)i + (uint32_t)__builtin_ctzll(mask);
            mask &= mask - 1;
        }
        at = end;
    }
    for (; i < count; i++)
        if (load(old + i * width, width) != load(new + i * width, width))
            *at++ = (uint32_t)i;
    return (size_t)(at - out);
}

typedef struct {
    const uint32_t *positions;
    size_t count;       /* of positions */
    size_t values;      /* of the block */
    uint32_t *gaps;
    uint8_t *nibbles;
    char *escapes;
    size_t changed, most_changed, escaped, most_escaped;
    uint64_t since;     /* values since the last change */
} Collected;

INLINE int collect_changes(size_t width, char *old, const char *new, Collected *to)
{
    uint64_t after = 0 - to->since; /* the value behind the last that changed, counted from the block's first */
    if (to->count > to->most_changed - to->changed)
        return 0;
    for (size_t i = 0; i < to->count; i++) {
        uint64_t position = to->positions[i], gap = position - after;
        if (position >= to->values || gap > UINT32_MAX)
            return 0;
        char *at = old + position * width;
        uint64_t value = load(new + position * width, width);
        uint64_t coded = zigzag(load(at, width), value, width) - 1;
        if (coded >= ESCAPE) {
            if (to->escaped >= to->most_escaped)
                return 0;
            store(to->escapes + to->escaped++ * width, value, width);
            coded = ESCAPE;
        }
        uint8_t *pair = to->nibbles + to->changed / 2;
        *pair = (uint8_t)(to->changed % 2 ? *pair | coded << 4 : coded);
        to->gaps[to->changed++] = (uint32_t)gap;
        store(at, value, width);
        after = position + 1;
    }
    to->since = to->values - after;
    return 1;
}

typedef struct {
    uint64_t base; /* of the block, counted as positions are */
    size_t values; /* of the block */
    const uint32_t *positions;
    const uint8_t *nibbles;
    const char *escapes;
    size_t changed, most_changed, escaped, most_escaped;
} Patched;

INLINE int patch_values(size_t width, char *block, Patched *from)
{
    /* In registers: a change to the block might be one to *from. */
    const uint32_t *positions = from->positions;
    const uint8_t *nibbles = from->nibbles;
    size_t changed = from->changed, most = from->most_changed, escaped = from->escaped;
    uint64_t base = from->base, values = from->values;
    int agreed = 1;

    for (; changed < most; changed++) {
        uint64_t position = positions[changed];
        if (position - base >= values) {
            agreed = position >= base;
            break;
        }
        char *at = block + (position - base) * width;
        unsigned coded = nibbles[changed / 2] >> (changed % 2 * 4) & 15;
        if (coded != ESCAPE) {
            store(at, load(at, width) + unzigzag(coded + 1), width);
        } else {
            if (escaped >= from->most_escaped) {
                agreed = 0;
                break;
            }
            memcpy(at, from->escapes + escaped++ * width, width);
        }
    }
    from->changed = changed;
    from->escaped = escaped;
    return agreed;
}

/* Byte j of all coded differences makes plane j. */
INLINE int spread_planes(size_t width, char *old, const char *new, size_t count, uint8_t *planes)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t coded = zigzag(load(old + i * width, width), load(new + i * width, width), width);
        for (size_t j = 0; j < width; j++)
            planes[j * count + i] = (uint8_t)(coded >> 8 * j);
    }
    memcpy(old, new, count * width);
    return 1;
}

INLINE int add_planes(size_t width, char *block, size_t count, const uint8_t *planes)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t coded = 0;
        for (size_t j = 0; j < width; j++)
            coded |= (uint64_t)planes[j * count + i] << 8 * j;
        store(block + i * width, load(block + i * width, width) + unzigzag(coded), width);
    }
    return 1;
}
