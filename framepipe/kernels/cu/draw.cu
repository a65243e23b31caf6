// Rectangles and text on one picture. Every pixel of every mark is looked at at once, and left to a later mark where
// one covers it. Marks and their text are arguments of the launch: nothing is uploaded.

const int DOTS_ACROSS = 5, CELL_ACROSS = 6;  // of a glyph, and of it with the gap beside it

// One word a character from the space on: bit 5 * row + column.
__constant__ u64 GLYPHS[] = {GLYPH_WORDS};

struct Box {
    int x1, y1, x2, y2;
};

__device__ __forceinline__ bool within(const Box& b, int x, int y)
{
    return x >= b.x1 && y >= b.y1 && x < b.x2 && y < b.y2;
}

// The sides of a mark's outline (above, below, left, right) and its label.
enum Part { LABEL = 4, PARTS = 5 };

__device__ __forceinline__ Box part_of(const Marks& m, const Mark& mark, int part)
{
    const int x1 = mark.box[0], y1 = mark.box[1], x2 = mark.box[2], y2 = mark.box[3];
    switch (part) {
    case 0: return {x1, y1, x2, min(y1 + m.thickness, y2)};
    case 1: return {x1, max(y2 - m.thickness, y1), x2, y2};
    case 2: return {x1, y1, min(x1 + m.thickness, x2), y2};
    case 3: return {max(x2 - m.thickness, x1), y1, x2, y2};
    default: return {mark.label[0], mark.label[1], mark.label[2], mark.label[3]};
    }
}

// Whether a mark's outline or label is at (x, y).
__device__ __forceinline__ bool covers(const Marks& m, const Mark& mark, int x, int y)
{
    const Box box = {mark.box[0], mark.box[1], mark.box[2], mark.box[3]};
    const Box hole = {box.x1 + m.thickness, box.y1 + m.thickness, box.x2 - m.thickness, box.y2 - m.thickness};
    return (within(box, x, y) && !within(hole, x, y)) || within(part_of(m, mark, LABEL), x, y);
}

__device__ __forceinline__ bool covered_later(const Marks& m, int number, int part, int x, int y)
{
    for (int p = part + 1; p < PARTS; p++)
        if (within(part_of(m, m.marks[number], p), x, y))
            return true;
    for (int i = number + 1; i < m.count; i++)
        if (covers(m, m.marks[i], x, y))
            return true;
    return false;
}

// Whether a dot of the text is at (x, y) pixels from the label's corner.
__device__ __forceinline__ bool inked(const Marks& m, const Mark& mark, int x, int y)
{
    const int row = y / m.scale - 1, column = x / m.scale - 1;  // one dot of margin above and on the left
    if (row < 0 || column < 0)
        return false;
    const int letter = column / CELL_ACROSS, dot = column % CELL_ACROSS;
    if (letter >= mark.letters || dot >= DOTS_ACROSS)
        return false;
    return GLYPHS[m.text[mark.text + letter]] >> (DOTS_ACROSS * row + dot) & 1;
}

extern "C" __global__ void __launch_bounds__(256) draw(u8* image, Marks m)
{
    const int number = blockIdx.z, part = blockIdx.y;
    const Mark& mark = m.marks[number];
    Box box = part_of(m, mark, part);
    box.x1 = max(box.x1, 0), box.y1 = max(box.y1, 0), box.x2 = min(box.x2, m.width), box.y2 = min(box.y2, m.height);
    const int across = box.x2 - box.x1, down = box.y2 - box.y1;
    if (across <= 0 || down <= 0)
        return;
    const int red = mark.color[0], green = mark.color[1], blue = mark.color[2];
    const int ink = 299 * red + 587 * green + 114 * blue > 128000 ? 0 : 255;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < across * down; i += gridDim.x * blockDim.x) {
        const int x = box.x1 + i % across, y = box.y1 + i / across;
        if (covered_later(m, number, part, x, y))
            continue;
        const bool dot = part == LABEL && inked(m, mark, x - mark.label[0], y - mark.label[1]);
        u8* to = image + (i64)y * m.row + (i64)x * m.column;
        to[0] = (u8)(dot ? ink : red);
        to[m.channel] = (u8)(dot ? ink : green);
        to[2 * m.channel] = (u8)(dot ? ink : blue);
    }
}
