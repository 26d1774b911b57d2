//! Number formats against `testdata/formats.safetensors` (bit for bit), and by property.

use bytes::Bytes;
use deepinfer_device::formats::{
    decode_row, dequantize_matrix_row, e2m1, e4m3, encode_matrix, encode_row, round_row, ue8m0,
};
use deepinfer_device::{Format, RowFormat, StoredMatrix};
use proptest::prelude::*;
use safetensors::SafeTensors;

struct Golden(Vec<u8>);

impl Golden {
    fn open() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/formats.safetensors");
        Golden(std::fs::read(path).expect("testdata/formats.safetensors"))
    }

    fn tensor(&self, name: &str) -> (Vec<usize>, Vec<u8>) {
        let file = SafeTensors::deserialize(&self.0).expect("a safetensors file");
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        (tensor.shape().to_vec(), tensor.data().to_vec())
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.tensor(name).1
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name);
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn bf16(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name);
        let read = |b: &[u8; 2]| half::bf16::from_le_bytes(*b).to_f32();
        bytes.as_chunks::<2>().0.iter().map(read).collect()
    }
}

/// Equal bits; any NaN equals any other.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[track_caller]
fn assert_same(name: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(same(*g, *w), "{name}[{i}]: {g:e}, not {w:e}");
    }
}

/// The same, with -0 equal to 0.
#[track_caller]
fn assert_equal(name: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g == w || g.is_nan() && w.is_nan(), "{name}[{i}]: {g:e}, not {w:e}");
    }
}

#[test]
fn codes() {
    let golden = Golden::open();
    let all: Vec<f32> = (0..=255).map(e4m3::decode).collect();
    assert_same("e4m3fn.decode", &all, &golden.f32("e4m3fn.decode"));
    let all: Vec<f32> = (0..16).map(e2m1::decode).collect();
    assert_same("e2m1.decode", &all, &golden.f32("e2m1.decode"));
    let all: Vec<f32> = (0..=255).map(ue8m0::decode).collect();
    assert_same("ue8m0.decode", &all, &golden.f32("ue8m0.decode"));

    let inputs = golden.f32("e4m3fn.encode.input");
    for (x, want) in inputs.iter().zip(golden.bytes("e4m3fn.encode.code")) {
        let got = e4m3::encode(*x);
        let nan = got & 0x7F == 0x7F && want & 0x7F == 0x7F;
        assert!(got == want || nan, "e4m3 of {x:e}: {got:#x}, not {want:#x}");
    }
    let inputs = golden.f32("e2m1.encode.input");
    for (x, want) in inputs.iter().zip(golden.bytes("e2m1.encode.code")) {
        assert_eq!(e2m1::encode(*x), want, "e2m1 of {x:e}");
    }
    let inputs = golden.f32("ue8m0.ceil.input");
    let bytes = golden.bytes("ue8m0.ceil.byte");
    for ((x, byte), value) in inputs.iter().zip(bytes).zip(golden.f32("ue8m0.ceil.value")) {
        assert_eq!(ue8m0::encode_ceil(*x), byte, "ue8m0 of {x:e}");
        assert_eq!(ue8m0::decode(byte), value);
    }
}

#[test]
fn cache_rows() {
    let golden = Golden::open();
    let input = golden.f32("cache.input");
    for (name, format) in [
        ("cache.fp8.dequant", RowFormat::Fp8x32),
        ("cache.nvfp4.dequant", RowFormat::Nvfp4x16),
        ("cache.mxfp4.dequant", RowFormat::Mxfp4x32),
    ] {
        let mut rounded = input.clone();
        let mut read = vec![0.0; input.len()];
        for (x, read) in rounded.chunks_mut(128).zip(read.chunks_mut(128)) {
            let mut bytes = vec![0; format.row_bytes(128)];
            encode_row(format, x, &mut bytes);
            decode_row(format, &bytes, read);
            round_row(format, x);
        }
        assert_same(name, &rounded, &golden.f32(name));
        assert_same(name, &read, &golden.f32(name));
    }
}

/// Rows of 512 as the pages of another engine hold them: values of all rows first, or row by row.
#[test]
fn cache_pages() {
    let golden = Golden::open();
    for tokens in [16, 64] {
        let name = |tail: &str| format!("page.p{tokens}.{tail}");
        let input = golden.bf16(&name("input"));
        for (tail, format, value_bytes) in
            [("v41", RowFormat::Fp8x32, 512), ("v41_fp4", RowFormat::Nvfp4x16, 256)]
        {
            let row_bytes = format.row_bytes(512);
            let scale_bytes = row_bytes - value_bytes;
            let paged = golden.bytes(&name(tail));
            let row_wise = golden.bytes(&name(&format!("{tail}_interleaved")));
            let want = golden.bf16(&name(&format!("{tail}.dequant")));
            let rows = input.chunks(512).zip(want.chunks(512)).enumerate();
            for (i, (x, want)) in rows {
                let (page, t) = (i / tokens, i % tokens);
                let page_bytes = paged.len() / 2;
                let page_start = page * page_bytes;
                let scales_at = page_start + tokens * value_bytes + t * scale_bytes;
                let mut stored = paged[page_start + t * value_bytes..][..value_bytes].to_vec();
                stored.extend_from_slice(&paged[scales_at..][..scale_bytes]);
                let row_page = row_wise.len() / 2;
                assert_eq!(stored, row_wise[page * row_page + t * row_bytes..][..row_bytes]);

                let mut read = vec![0.0; 512];
                decode_row(format, &stored, &mut read);
                assert_same(tail, &read, want);

                let mut bytes = vec![0; row_bytes];
                encode_row(format, x, &mut bytes);
                if format == RowFormat::Nvfp4x16 {
                    assert_eq!(bytes, stored, "{tail}, row {i}");
                    continue;
                }
                // That engine's floor is on the scale, ours is on the magnitude.
                for (g, x) in x.chunks(32).enumerate() {
                    let amax = x.iter().fold(0f32, |a, v| a.max(v.abs()));
                    if amax >= 448.0 * 1e-4 {
                        assert_eq!(bytes[512 + g], stored[512 + g], "{tail}, row {i}");
                        assert_eq!(bytes[g * 32..][..32], stored[g * 32..][..32]);
                    }
                }
            }
        }
        let mut rounded = input.clone();
        rounded.chunks_mut(512).for_each(|x| round_row(RowFormat::Fp8x32, x));
        let tail = "fp8_clamp_amax.dequant";
        assert_same(tail, &rounded, &golden.f32(&name(tail)));
    }
}

fn dequantize(m: &StoredMatrix) -> Vec<f32> {
    let mut out = vec![0.0; m.rows * m.cols];
    for (r, out) in out.chunks_mut(m.cols.max(1)).enumerate() {
        dequantize_matrix_row(m, r, out);
    }
    out
}

#[test]
fn weights() {
    let golden = Golden::open();
    for (name, format) in [
        ("fp8_block32", Format::Fp8Block32),
        ("fp8_block32.partial", Format::Fp8Block32),
        ("fp4_row32", Format::Fp4Row32),
        ("fp4_row32.random", Format::Fp4Row32),
        ("engram_row", Format::Fp8Row32),
    ] {
        let (shape, _) = golden.tensor(&format!("{name}.dequant"));
        let (rows, cols) = (shape[0], shape[1]);
        let data = golden.bytes(&format!("{name}.weight"));
        let scale = golden.bytes(&format!("{name}.scale"));
        let (shape, _) = golden.tensor(&format!("{name}.scale"));
        assert_eq!(format.scale_shape(rows, cols), Some((shape[0], shape[1])));

        let matrix =
            StoredMatrix::new(format, rows, cols, data.clone().into(), scale.clone().into());
        let want = golden.f32(&format!("{name}.dequant"));
        assert_equal(name, &dequantize(&matrix), &want);

        if !name.contains('.') {
            let input = golden.f32(&format!("{name}.input"));
            assert_eq!(encode_matrix(format, &input, rows, cols), (data, scale), "{name}");
        }

        // Bytes at an odd address, and a view of a part.
        let mut shifted = vec![0xA5];
        shifted.extend_from_slice(&matrix.data);
        let mut odd = matrix.clone();
        odd.data = Bytes::from(shifted).slice(1..);
        let view = odd.row_range(5..rows - 1).col_range(32..cols);
        let want: Vec<f32> =
            (5..rows - 1).flat_map(|r| &want[r * cols + 32..][..cols - 32]).copied().collect();
        assert_equal(name, &dequantize(&view), &want);
    }
}

fn any_f32() -> impl Strategy<Value = f32> {
    prop_oneof![
        any::<u32>().prop_map(f32::from_bits),
        -8.0f32..8.0,
        (-60i32..60, -1.0f32..1.0).prop_map(|(e, m)| m * 2f32.powi(e)),
    ]
}

fn row_format() -> impl Strategy<Value = RowFormat> {
    prop::sample::select(vec![
        RowFormat::F32,
        RowFormat::Bf16,
        RowFormat::Fp8x32,
        RowFormat::Nvfp4x16,
        RowFormat::Mxfp4x32,
    ])
}

proptest! {
    /// The code is the nearest value: no other code is nearer.
    #[test]
    fn codes_are_nearest(x in any_f32().prop_filter("a number", |x| !x.is_nan())) {
        let clamped = x.clamp(-e4m3::MAX, e4m3::MAX) as f64;
        let got = (e4m3::decode(e4m3::encode(x)) as f64 - clamped).abs();
        for code in (0..=255).filter(|c| c & 0x7F != 0x7F) {
            prop_assert!(got <= (e4m3::decode(code) as f64 - clamped).abs());
        }
        let clamped = x.clamp(-e2m1::MAX, e2m1::MAX) as f64;
        let got = (e2m1::decode(e2m1::encode(x)) as f64 - clamped).abs();
        for code in 0..16 {
            prop_assert!(got <= (e2m1::decode(code) as f64 - clamped).abs());
        }
    }

    /// Storing and reading is rounding, and rounding twice changes nothing.
    #[test]
    fn rows_round_once(
        format in row_format(),
        mut x in prop::collection::vec(any_f32().prop_filter("a number", |x| !x.is_nan()), 0..100),
    ) {
        let mut bytes = vec![0; format.row_bytes(x.len())];
        encode_row(format, &x, &mut bytes);
        let mut read = vec![0.0; x.len()];
        decode_row(format, &bytes, &mut read);
        if format != RowFormat::Bf16 {
            round_row(format, &mut x);
            prop_assert!(x.iter().zip(&read).all(|(a, b)| same(*a, *b)));
        }
        let mut again = vec![0; bytes.len()];
        encode_row(format, &read, &mut again);
        let mut reread = vec![0.0; x.len()];
        decode_row(format, &again, &mut reread);
        // A row that saturated has a smaller largest magnitude, so its second scale may differ.
        if read.iter().all(|v| v.abs() < 1e30) {
            prop_assert_eq!(read, reread);
        }
    }

    /// Any bytes can be read.
    #[test]
    fn any_row_can_be_read(
        format in row_format(),
        width in 0usize..100,
        seed in any::<u64>(),
    ) {
        let byte = |i: usize| (seed.wrapping_mul(i as u64 * 2 + 1) >> 29) as u8;
        let bytes: Vec<u8> = (0..format.row_bytes(width)).map(byte).collect();
        let mut read = vec![0.0; width];
        decode_row(format, &bytes, &mut read);
    }

    /// Weights come back with at most half a step of error, and encode to the same bytes again.
    #[test]
    fn weights_round_once(
        format in prop::sample::select(vec![
            Format::F32, Format::Bf16, Format::Fp8Block32, Format::Fp4Row32, Format::Fp8Row32,
        ]),
        rows in 0usize..40,
        cols in 0usize..70,
        seed in any::<u32>(),
    ) {
        let value = |i: usize| {
            let r = (seed ^ i as u32).wrapping_mul(0x9E37_79B9).wrapping_mul(i as u32 | 1);
            (r as f32 / u32::MAX as f32 - 0.5) * 4.0
        };
        let x: Vec<f32> = (0..rows * cols).map(value).collect();
        let (data, scale) = encode_matrix(format, &x, rows, cols);
        let matrix = StoredMatrix::new(format, rows, cols, data.into(), scale.into());
        let read = dequantize(&matrix);
        let bound = match format {
            Format::F32 => 0.0,
            Format::Bf16 => 2f32.powi(-8),
            Format::Fp8Block32 | Format::Fp8Row32 => 2f32.powi(-4),
            Format::Fp4Row32 => 0.25,
        };
        for (x, y) in x.iter().zip(&read) {
            // A quarter of the range is the largest step of fp4, at magnitudes up to 2.
            let scale = if format == Format::Fp4Row32 { 2.0f32 } else { x.abs().max(1e-3) };
            prop_assert!((x - y).abs() <= bound * scale, "{:?}: {} became {}", format, x, y);
        }
        let (data, scale) = encode_matrix(format, &read, rows, cols);
        let again = StoredMatrix::new(format, rows, cols, data.into(), scale.into());
        prop_assert_eq!(dequantize(&again), read);
    }
}
