//! Memory, and moving, rounding and joining rows.

mod common;

use common::*;
use deepinfer_device::formats::{decode_row, encode_matrix};
use deepinfer_device::ops::ABSENT;
use deepinfer_device::{Device, Format, RowFormat, StoredMatrix};
use half::bf16;

const FORMATS: [RowFormat; 5] =
    [RowFormat::F32, RowFormat::Bf16, RowFormat::Fp8x32, RowFormat::Nvfp4x16, RowFormat::Mxfp4x32];

fn buffers_copy<D: Device>(device: &D) -> Vec<u32> {
    let mut a = device.alloc::<u32>(10).expect("fits");
    let mut host = vec![7; 10];
    device.download(&a, 0, &mut host).expect("downloads");
    assert_eq!(host, [0; 10], "new memory is zero");
    device.upload(&[1, 2, 3], &mut a, 4).expect("uploads");
    let mut b = output::<D, u32>(device, 8);
    device.copy(&a, 3, &mut b, 1, 5).expect("copies");
    device.copy_within(&mut b, 2, 6, 2).expect("copies");
    device.sync().expect("syncs");
    let poison = u32::POISON;
    let got = read(device, &b);
    assert_eq!(got, [poison, 0, 1, 2, 3, 0, 1, 2]);
    got
}

fn gather_and_scatter<D: Device>(device: &D) -> Vec<u32> {
    let width = 3;
    let src: Vec<u32> = (0..300).collect();
    let indices = [99, 0, ABSENT, 7, 7, ABSENT];
    let mut out = output(device, indices.len() * width);
    let on_device = buffer(device, &src);
    device.gather_rows(&on_device, width, &buffer(device, &indices), 6, &mut out).expect("runs");
    let gathered = read(device, &out);
    for (row, index) in gathered.chunks_exact(width).zip(indices) {
        let at = index as usize * width;
        let want = if index == ABSENT { &[u32::POISON; 3][..] } else { &src[at..at + width] };
        assert_eq!(row, want);
    }
    let to = [5, u64::MAX, 0, 19];
    let mut out = output(device, 20 * width);
    device.scatter_rows(&on_device, width, &buffer(device, &to), 4, &mut out).expect("runs");
    let scattered: Vec<u32> = read(device, &out);
    for (i, row) in scattered.chunks_exact(width).enumerate() {
        let want = match to.iter().position(|to| *to == i as u64) {
            Some(from) => &src[from * width..][..width],
            None => &[u32::POISON; 3][..],
        };
        assert_eq!(row, want, "row {i}");
    }
    [gathered, scattered].concat()
}

fn stored_rows<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    let in_order: Vec<u32> = (0..512).collect();
    for format in FORMATS {
        let width = 96;
        let x = Random::new(5).normals(512 * width, 3.0);
        let bytes = encoded(&x, width, format);
        let row_bytes = format.row_bytes(width);
        let run = |r: std::ops::Range<usize>| {
            let mut out = output(device, r.len() * row_bytes);
            let x = act(device, rows_of(&x, width, &r));
            device.encode_rows(&x, width, format, r.len(), &mut out).expect("runs");
            read::<D, u8>(device, &out).iter().map(|b| u32::from(*b)).collect()
        };
        let got = same_in_any_batch(512, run);
        assert!(got.iter().zip(&bytes).all(|(a, b)| *a == u32::from(*b)), "{format:?}");
        let values = decoded(&bytes, width, format);
        let mut out = output_act(device, values.len());
        let (stored, order) = (buffer(device, &bytes), buffer(device, &in_order));
        device.decode_rows(&stored, width, format, &order, 512, &mut out).expect("runs");
        let decoded = read_act(device, &out);
        close(
            &decoded,
            &values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
            tolerance::<D>(),
        );
        // Rounding in place is storing and reading, and leaves exact rows alone.
        let mut rounded = in_place(device, &x);
        device.round_rows(&mut rounded, width, format, 512).expect("runs");
        let want = if format == device.exact_rows() { &x } else { &decoded };
        if !matches!(format, RowFormat::F32 | RowFormat::Bf16) || format == device.exact_rows() {
            assert!(bits(&read_act(device, &rounded)) == bits(want), "{format:?}");
        }
        all.extend(bits(&decoded));
    }
    all
}

/// Any bytes, in rows of even and odd widths, read by number.
fn stored_rows_by_number<D: Device>(device: &D) -> Vec<u32> {
    let mut random = Random::new(8);
    let mut all = Vec::new();
    for (format, width) in FORMATS.into_iter().flat_map(|f| [512, 256, 96, 47].map(|w| (f, w))) {
        let (rows, row_bytes) = (29, format.row_bytes(width));
        let bytes: Vec<u8> = (0..rows * row_bytes).map(|_| random.word() as u8).collect();
        let indices: Vec<u32> = [28, 0, ABSENT, 7, 7, ABSENT, 13].repeat(5);
        let mut out = output_act(device, indices.len() * width);
        let (stored, on_device) = (buffer(device, &bytes), buffer(device, &indices));
        device
            .decode_rows(&stored, width, format, &on_device, indices.len(), &mut out)
            .expect("runs");
        let got = read_act(device, &out);
        let mut want = vec![0.0; width];
        for (row, index) in got.chunks_exact(width).zip(indices) {
            want.fill(f32::POISON);
            if index != ABSENT {
                decode_row(format, &bytes[index as usize * row_bytes..][..row_bytes], &mut want);
            }
            for (c, (got, want)) in row.iter().zip(&want).enumerate() {
                let want =
                    if size_of::<D::Act>() == 2 { bf16::from_f32(*want).to_f32() } else { *want };
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{format:?} of {width}: value {c} is {got}, not {want}");
            }
        }
        all.extend(got.iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() }));
    }
    all
}

fn embedding_rows<D: Device>(device: &D) -> Vec<u32> {
    let (rows, width) = (50, 64);
    let values = Random::new(6).normals(rows * width, 1.0);
    let (data, scale) = encode_matrix(Format::Bf16, &values, rows, width);
    let stored = StoredMatrix::new(Format::Bf16, rows, width, data.into(), scale.into());
    let table = device.matrix(stored).expect("tables work everywhere");
    let tokens = [49, ABSENT, 0, 3];
    let mut out = output_act(device, 4 * width);
    device.embed(&table, &buffer(device, &tokens), 4, &mut out).expect("runs");
    let got = read_act(device, &out);
    for (row, token) in got.chunks_exact(width).zip(tokens) {
        let want = match token {
            ABSENT => &[f32::POISON; 64][..],
            token => &values[token as usize * width..][..width],
        };
        assert_eq!(row, want);
    }
    bits(&got)
}

fn concat_and_add<D: Device>(device: &D) -> Vec<u32> {
    let mut random = Random::new(7);
    let (a, b) = (random.normals(4 * 5, 1.0), random.normals(4 * 3, 1.0));
    let mut out = output_act(device, 4 * 8);
    device.concat(&act(device, &a), 5, &act(device, &b), 3, 4, &mut out).expect("runs");
    let joined = read_act(device, &out);
    for (i, row) in joined.chunks_exact(8).enumerate() {
        assert_eq!(row, [&a[i * 5..][..5], &b[i * 3..][..3]].concat());
    }
    let mut sums = buffer(device, &[&[1.0f32; 24][..], &[f32::POISON; 67]].concat());
    let to = buffer(device, &[3, 0]);
    device.add_rows_f32(&buffer(device, &b), 6, 2, &mut sums, &to).expect("runs");
    let sums = read(device, &sums);
    let want: Vec<f32> = (0..24)
        .map(|i| match i / 6 {
            3 => 1.0 + b[i % 6],
            0 => 1.0 + b[6 + i % 6],
            _ => 1.0,
        })
        .collect();
    assert_eq!(sums, want);
    [bits(&joined), bits(&sums)].concat()
}

#[test]
fn memory() {
    for_each_device!(buffers_copy);
}

#[test]
fn moves() {
    for_each_device!(gather_and_scatter);
    for_each_device!(embedding_rows);
    for_each_device!(concat_and_add);
}

#[test]
fn storage() {
    for_each_device!(stored_rows);
    for_each_device!(stored_rows_by_number);
}
