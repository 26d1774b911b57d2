//! Linear layers: the same bits for every row count, thread count and instruction set; right
//! against f64.

mod common;

use bytes::Bytes;
use deepinfer_device::cpu::linear::{Weight, grouped_linear, linear, linear_f32};
use deepinfer_device::cpu::{Cpu, Isa};
use deepinfer_device::formats::{dequantize_matrix_row, encode_matrix};
use deepinfer_device::{Device, Format, StoredMatrix};
use proptest::prelude::*;

const FORMATS: [Format; 5] =
    [Format::F32, Format::Bf16, Format::Fp8Block32, Format::Fp4Row32, Format::Fp8Row32];
const ROWS: [usize; 20] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 16, 17, 18, 19, 127, 128, 129, 512];

/// A small generator, so that a case is its seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Roughly normal.
    fn value(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).sum();
        sum * 1.7
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// A matrix at an odd address, seen through a view that starts inside a tile.
    fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> StoredMatrix {
        let spread: Vec<f32> =
            (0..rows + 3).map(|_| 2f32.powi(self.next() as i32 % 4 - 3)).collect();
        let x: Vec<f32> =
            (0..(rows + 3) * cols).map(|i| self.value() * spread[i / cols.max(1)]).collect();
        let (data, scale) = encode_matrix(format, &x, rows + 3, cols);
        let odd = |bytes: Vec<u8>| {
            let mut shifted = vec![0xA5];
            shifted.extend(bytes);
            Bytes::from(shifted).slice(1..)
        };
        StoredMatrix::new(format, rows + 3, cols, odd(data), odd(scale)).row_range(3..rows + 3)
    }
}

fn cpus() -> Vec<Cpu> {
    let make = |isa| [1, 2].map(|threads| Cpu::with_isa(Some(threads), isa).expect("a pool"));
    Isa::available().flat_map(make).collect()
}

fn name(cpu: &Cpu) -> String {
    format!("{:?}, {} threads", cpu.isa(), cpu.threads())
}

/// Equal bits; any NaN equals any other.
#[track_caller]
fn assert_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g.to_bits() == w.to_bits() || g.is_nan() && w.is_nan();
        assert!(same, "{what}: [{i}] is {g:e}, not {w:e}");
    }
}

fn run(cpu: &Cpu, x: &[f32], w: &Weight, rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * w.rows()];
    linear(cpu, x, w, rows, &mut out);
    out
}

/// The reference: one thread of plain Rust, row by row.
fn row_by_row(x: &[f32], w: &Weight, rows: usize) -> Vec<f32> {
    let cpu = Cpu::with_isa(Some(1), Isa::Scalar).expect("a pool");
    (0..rows).flat_map(|i| run(&cpu, &x[i * w.cols()..][..w.cols()], w, 1)).collect()
}

#[test]
fn bits_do_not_depend_on_rows_threads_or_instructions() {
    let cpus = cpus();
    let mut random = Random(1);
    for format in FORMATS {
        for (n, k) in [(70, 192), (37, 72), (64, 2080)] {
            let w = Weight::new(random.matrix(format, n, k)).expect("a weight");
            let x = random.values(512 * k);
            let want = row_by_row(&x, &w, 512);
            for cpu in &cpus {
                for rows in ROWS {
                    let what = format!("{format:?} {n} x {k}, {rows} rows, {}", name(cpu));
                    assert_bits(&what, &run(cpu, &x, &w, rows), &want[..rows * n]);
                }
            }
        }
    }
}

/// Tall matrices of short rows: a unit of work for few activation rows spans several tiles, the first
/// and the last of them cut by the view.
#[test]
fn units_of_several_tiles() {
    let mut random = Random(7);
    for format in FORMATS {
        for (n, k) in [(1301, 40), (2085, 72)] {
            let w = Weight::new(random.matrix(format, n, k)).expect("a weight");
            let x = random.values(8 * k);
            let want = row_by_row(&x, &w, 8);
            for cpu in &cpus() {
                for rows in [1, 2, 5, 8] {
                    let what = format!("{format:?} {n} x {k}, {rows} rows, {}", name(cpu));
                    assert_bits(&what, &run(cpu, &x, &w, rows), &want[..rows * n]);
                }
            }
        }
    }
}

/// The error stays within what f32 sums of this length may have, and leans to no side.
#[test]
fn close_to_f64_and_without_bias() {
    let mut random = Random(2);
    let (rows, n, k) = (9, 130, 1000);
    for format in FORMATS {
        let w = Weight::new(random.matrix(format, n, k)).expect("a weight");
        let x = random.values(rows * k);
        let mut row = vec![0.0; k];
        let mut want = vec![0.0; rows * n];
        let mut size = vec![0.0; rows * n];
        for j in 0..n {
            dequantize_matrix_row(w.stored(), j, &mut row);
            for i in 0..rows {
                for (x, w) in x[i * k..].iter().zip(&row) {
                    want[i * n + j] += *x as f64 * *w as f64;
                    size[i * n + j] += (*x as f64 * *w as f64).abs();
                }
            }
        }
        for cpu in cpus() {
            let got = run(&cpu, &x, &w, rows);
            // Each lane rounds ceil(k / 16) times, the tree 4 times.
            let bound = 2f64.powi(-24) * (k.div_ceil(16) + 4) as f64;
            let errors: Vec<f64> = got
                .iter()
                .zip(&want)
                .zip(&size)
                .map(|((got, want), size)| (*got as f64 - want) / size)
                .collect();
            let what = format!("{format:?}, {}", name(&cpu));
            assert!(errors.iter().all(|e| e.abs() <= bound), "{what}");
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            let square = errors.iter().map(|e| e * e).sum::<f64>() / errors.len() as f64;
            let deviation = (square / errors.len() as f64).sqrt();
            assert!(
                mean.abs() <= 4.0 * deviation,
                "{what}: mean {mean:e}, deviation {deviation:e}"
            );
            assert!(square > 0.0, "{what}: f32 sums round");
        }
    }
}

#[test]
fn one_column_at_a_time_is_the_weight() {
    let mut random = Random(3);
    for format in FORMATS {
        let (n, k) = (40, 100);
        let w = Weight::new(random.matrix(format, n, k)).expect("a weight");
        let mut x = vec![0.0; k * k];
        (0..k).for_each(|i| x[i * k + i] = 1.0);
        let mut row = vec![0.0; k];
        for cpu in cpus() {
            let got = run(&cpu, &x, &w, k);
            for j in 0..n {
                dequantize_matrix_row(w.stored(), j, &mut row);
                let column: Vec<f32> = (0..k).map(|i| got[i * n + j]).collect();
                assert!(column.iter().zip(&row).all(|(a, b)| a == b), "{format:?} {}", name(&cpu));
            }
        }
    }
}

#[test]
fn groups_and_factors() {
    let mut random = Random(4);
    for format in FORMATS {
        let (groups, o, i, rows) = (3, 41, 96, 7);
        let w = Weight::new(random.matrix(format, groups * o, i)).expect("a weight");
        let x = random.values(rows * groups * i);
        for cpu in cpus() {
            let mut got = vec![f32::NAN; rows * groups * o];
            grouped_linear(&cpu, &x, &w, groups, rows, &mut got);
            for g in 0..groups {
                let part = Weight::new(w.stored().row_range(g * o..(g + 1) * o)).expect("a part");
                for r in 0..rows {
                    let want = row_by_row(&x[(r * groups + g) * i..][..i], &part, 1);
                    let got = &got[(r * groups + g) * o..][..o];
                    assert_bits(&format!("{format:?} {}", name(&cpu)), got, &want);
                }
            }
            let whole = run(&cpu, &x, &w, rows * groups);
            let mut scaled = vec![f32::NAN; whole.len()];
            linear_f32(&cpu, &x, &w, 0.3, rows * groups, &mut scaled);
            let want: Vec<f32> = whole.iter().map(|v| v * 0.3).collect();
            assert_bits("factor", &scaled, &want);
        }
    }
}

#[test]
fn nothing_beyond_the_output_is_written() {
    let mut random = Random(5);
    let w = Weight::new(random.matrix(Format::Fp8Block32, 33, 64)).expect("a weight");
    let x = random.values(2 * 64);
    for cpu in cpus() {
        let mut out = vec![7.0; 100];
        linear(&cpu, &x, &w, 2, &mut out);
        assert_eq!(out[66..], [7.0; 34]);
        linear(&cpu, &x, &w, 0, &mut []);
    }
}

#[test]
fn a_matrix_must_cover_its_shape() {
    for format in FORMATS {
        let (data, scale) = encode_matrix(format, &[1.0; 64 * 64], 64, 64);
        let whole = StoredMatrix::new(format, 64, 64, data.into(), scale.into());
        assert!(Weight::new(whole.clone()).is_ok());
        let mut short = whole.clone();
        short.data = short.data.slice(..short.data.len() - 1);
        let message = Weight::new(short).expect_err("one byte is missing").to_string();
        assert!(message.contains("64 x 64") && message.contains("do not cover"), "{message}");
        if !whole.scale.is_empty() {
            let mut short = whole;
            short.scale = short.scale.slice(1..);
            assert!(Weight::new(short).is_err());
        }
    }
}

/// A value of any size, special ones included.
fn wild() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -2.0f32..2.0,
        2 => (-126i32..127, -2.0f32..2.0).prop_map(|(e, m)| m * 2f32.powi(e)),
        1 => any::<u32>().prop_map(f32::from_bits),
        1 => Just(0.0),
        1 => Just(-0.0),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// Any bytes as codes and scales, any activations, any shape and view.
    #[test]
    fn any_codes_give_the_same_bits(
        format in prop::sample::select(FORMATS.to_vec()),
        n in 1usize..70,
        k in 1usize..200,
        rows in 1usize..20,
        cut in 0usize..40,
        tame_scales in any::<bool>(),
        seed in any::<u64>(),
        wild in prop::collection::vec(wild(), 1..50),
    ) {
        let mut random = Random(seed);
        let mut bytes = |n: usize| (0..n).map(|_| random.next() as u8).collect::<Vec<u8>>();
        let (scale_rows, groups) = format.scale_shape(n + cut, k).unwrap_or((0, 0));
        let data = bytes((n + cut) * format.row_bytes(k));
        let mut scale = bytes(scale_rows * groups);
        if tame_scales {
            scale.iter_mut().for_each(|b| *b = 110 + *b % 20);
        }
        let m = StoredMatrix::new(format, n + cut, k, data.into(), scale.into());
        let w = Weight::new(m.row_range(cut..cut + n)).expect("a weight");
        let mut x = random.values(rows * k);
        for v in wild {
            let at = random.next() as usize % x.len();
            x[at] = v;
        }
        let want = row_by_row(&x, &w, rows);
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(Some(1), isa).expect("a pool");
            assert_bits(&format!("{isa:?}"), &run(&cpu, &x, &w, rows), &want);
            assert_bits(&format!("{isa:?}"), &run(&cpu, &x, &w, 1), &want[..n]);
        }
    }
}

/// Activations that are exact in bf16.
fn act_values(random: &mut Random, n: usize) -> Vec<f32> {
    let exact = |x: f32| half::bf16::from_f32(x).to_f32();
    random.values(n).into_iter().map(exact).collect()
}

/// `x @ w^T` with f32 results on any device.
fn f32_product<D: Device>(device: &D, x: &[f32], w: &D::Matrix, n: usize, rows: usize) -> Vec<f32> {
    let mut out = common::output(device, rows * n);
    device.linear_f32(&common::act(device, x), w, 1.0, rows, &mut out).expect("runs");
    common::read(device, &out)
}

/// The same with activations as results, of `groups` groups.
fn act_product<D: Device>(
    device: &D,
    x: &[f32],
    w: &D::Matrix,
    n: usize,
    groups: usize,
    rows: usize,
) -> Vec<f32> {
    let mut out = common::output_act(device, rows * n);
    let x = common::act(device, x);
    match groups {
        1 => device.linear(&x, w, rows, &mut out).expect("runs"),
        _ => device.grouped_linear(&x, w, groups, rows, &mut out).expect("runs"),
    }
    common::read_act(device, &out)
}

fn rows_do_not_see_each_other<D: Device>(device: &D) -> Vec<u32> {
    let mut random = Random(11);
    let mut all = Vec::new();
    // The second shape has no whole groups, the last one enough tiles to walk all chunks in each.
    for (n, k) in [(70, 192), (37, 75), (200, 2080), (130, 5120), (4100, 320)] {
        for format in FORMATS {
            if n > 1000 && !matches!(format, Format::Fp8Block32 | Format::Bf16) {
                continue;
            }
            let w = device.matrix(random.matrix(format, n, k)).expect("a weight");
            let x = act_values(&mut random, 512 * k);
            let wide = f32_product(device, &x, &w, n, 512);
            let narrow = act_product(device, &x, &w, n, 1, 512);
            let check = |from: usize, rows: usize| {
                let x = &x[from * k..][..rows * k];
                let what = format!("{format:?} {n} x {k}, rows {from}.. ({rows})");
                assert_bits(
                    &what,
                    &f32_product(device, x, &w, n, rows),
                    &wide[from * n..][..rows * n],
                );
                let got = act_product(device, x, &w, n, 1, rows);
                assert_bits(&what, &got, &narrow[from * n..][..rows * n]);
            };
            let counts: &[usize] = if n > 1000 { &[1, 33, 128] } else { &ROWS };
            counts.iter().for_each(|rows| check(0, *rows));
            counts.iter().for_each(|rows| check(512 - rows, *rows));
            check(77, 1);
            all.extend(common::bits(&wide));
        }
    }
    all
}

/// Bound of the error of a sum of `k` products, relative to the sum of magnitudes. Tensor cores add
/// eight aligned products to a sum, cut off (not rounded) below its last place.
fn error_bound(k: usize) -> f64 {
    2f64.powi(-22) * (k.div_ceil(8) + 8) as f64
}

fn close_to_f64<D: Device>(device: &D) -> Vec<u32> {
    let mut random = Random(12);
    let mut all = Vec::new();
    for (rows, n, k) in [(9, 130, 1000), (64, 130, 1000), (3, 40, 5120)] {
        for format in FORMATS {
            let stored = random.matrix(format, n, k);
            let w = device.matrix(stored.clone()).expect("a weight");
            let x = act_values(&mut random, rows * k);
            let got = f32_product(device, &x, &w, n, rows);
            let rounded = act_product(device, &x, &w, n, 1, rows);
            let mut row = vec![0.0; k];
            let (mut worst, mut sum, mut squares) = (0f64, 0f64, 0f64);
            for j in 0..n {
                dequantize_matrix_row(&stored, j, &mut row);
                for i in 0..rows {
                    let terms = x[i * k..][..k].iter().zip(&row);
                    let products = terms.map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let (want, size) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
                    let error = (f64::from(got[i * n + j]) - want) / size;
                    worst = worst.max(error.abs());
                    (sum, squares) = (sum + error, squares + error * error);
                    let narrow = f64::from(rounded[i * n + j]);
                    let allowed = error_bound(k) * size + common::tolerance::<D>() * want.abs();
                    assert!((narrow - want).abs() <= allowed, "{format:?}: {narrow}, not {want}");
                }
            }
            let count = (n * rows) as f64;
            let what = format!("{format:?} {rows} x {n} x {k}");
            println!(
                "{what}: worst {worst:e}, mean {:e}, rms {:e}",
                sum / count,
                (squares / count).sqrt()
            );
            assert!(worst <= error_bound(k), "{what}");
            // Five deviations of a mean of independent errors.
            assert!((sum / count).abs() <= 5.0 * (squares / count / count).sqrt(), "{what}");
            all.extend(common::bits(&got));
        }
    }
    all
}

/// Rows of the unit matrix read the weights, exactly.
fn unit_rows_read_weights<D: Device>(device: &D) -> Vec<u32> {
    let mut random = Random(13);
    let mut all = Vec::new();
    for format in FORMATS {
        for k in [100, 104] {
            let n = 40;
            let stored = random.matrix(format, n, k);
            let w = device.matrix(stored.clone()).expect("a weight");
            let mut x = vec![0.0; k * k];
            (0..k).for_each(|i| x[i * k + i] = 1.0);
            let mut row = vec![0.0; k];
            for rows in [k, 5] {
                let got = f32_product(device, &x[..rows * k], &w, n, rows);
                let narrow = act_product(device, &x[..rows * k], &w, n, 1, rows);
                for j in 0..n {
                    dequantize_matrix_row(&stored, j, &mut row);
                    for i in 0..rows {
                        assert!(got[i * n + j] == row[i], "{format:?} [{j}, {i}]");
                        let exact = format != Format::F32 || size_of::<D::Act>() == 4;
                        assert!(!exact || narrow[i * n + j] == row[i], "{format:?} [{j}, {i}]");
                    }
                }
                all.extend(common::bits(&got));
            }
        }
    }
    all
}

/// Every code, with scales over most of their range.
fn every_code_is_read<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for format in [Format::Fp8Block32, Format::Fp8Row32, Format::Fp4Row32] {
        let (n, k) = (64, 64);
        let data: Vec<u8> = (0..n * format.row_bytes(k))
            .map(|i| i as u8)
            .map(|code| if format != Format::Fp4Row32 && code & 0x7f == 0x7f { 0 } else { code })
            .collect();
        let (scale_rows, groups) = format.scale_shape(n, k).unwrap_or((0, 0));
        for lowest in [12u8, 60, 100, 124] {
            let scale =
                (0..scale_rows * groups).map(|i| lowest + (i % 5) as u8).collect::<Vec<_>>();
            let stored = StoredMatrix::new(format, n, k, data.clone().into(), scale.into());
            let w = device.matrix(stored.clone()).expect("a weight");
            let mut x = vec![0.0; k * k];
            (0..k).for_each(|i| x[i * k + i] = 1.0);
            let got = f32_product(device, &x, &w, n, k);
            let mut row = vec![0.0; k];
            for j in 0..n {
                dequantize_matrix_row(&stored, j, &mut row);
                for i in 0..k {
                    assert!(got[i * n + j] == row[i], "{format:?}, scale {lowest}: [{j}, {i}]");
                }
            }
            all.extend(common::bits(&got));
        }
    }
    all
}

fn groups_are_products_of_parts<D: Device>(device: &D) -> Vec<u32> {
    let mut random = Random(14);
    let mut all = Vec::new();
    for format in FORMATS {
        let (groups, o, k) = (3, 41, 96);
        let stored = random.matrix(format, groups * o, k);
        let w = device.matrix(stored.clone()).expect("a weight");
        for rows in [1, 7, 40, 129] {
            let x = act_values(&mut random, rows * groups * k);
            let got = act_product(device, &x, &w, groups * o, groups, rows);
            for g in 0..groups {
                let part = device.matrix(stored.row_range(g * o..(g + 1) * o)).expect("a part");
                let of_group = |r: usize| &x[(r * groups + g) * k..][..k];
                let x: Vec<f32> = (0..rows).flat_map(of_group).copied().collect();
                let want = act_product(device, &x, &part, o, 1, rows);
                for r in 0..rows {
                    let got = &got[(r * groups + g) * o..][..o];
                    assert_bits(&format!("{format:?}"), got, &want[r * o..][..o]);
                }
            }
            all.extend(common::bits(&got));
        }
        let x = act_values(&mut random, 7 * k);
        let whole = f32_product(device, &x, &w, groups * o, 7);
        let mut out = common::output(device, whole.len());
        device.linear_f32(&common::act(device, &x), &w, 0.3, 7, &mut out).expect("runs");
        let want: Vec<f32> = whole.iter().map(|v| v * 0.3).collect();
        assert_bits("factor", &common::read(device, &out), &want);
        device.linear_f32(&common::act(device, &[]), &w, 1.0, 0, &mut out).expect("runs");
    }
    all
}

#[test]
fn devices_rows() {
    on_cuda!(rows_do_not_see_each_other);
}

#[test]
fn devices_precision() {
    on_cuda!(close_to_f64);
}

#[test]
fn devices_weights() {
    for_each_device!(unit_rows_read_weights);
    for_each_device!(every_code_is_read);
    for_each_device!(large_scales_are_read);
    for_each_device!(nan_codes_are_nan);
}

#[test]
fn devices_groups() {
    for_each_device!(groups_are_products_of_parts);
}

#[test]
fn cuda_refuses_what_it_cannot_read() {
    let Some(cuda) = common::cuda() else { return };
    let (data, scale) = encode_matrix(Format::Fp8Block32, &[1.0; 64 * 64], 64, 64);
    let mut short = StoredMatrix::new(Format::Fp8Block32, 64, 64, data.into(), scale.into());
    short.data = short.data.slice(1..);
    let message = |m| cuda.matrix(m).err().expect("refused").to_string();
    assert!(message(short).contains("do not cover"));
}

/// Scales that kernels cannot apply on the way make no difference to results.
fn large_scales_are_read<D: Device>(device: &D) -> Vec<u32> {
    let mut all = Vec::new();
    for format in [Format::Fp8Block32, Format::Fp8Row32, Format::Fp4Row32] {
        let (n, k) = (64, 64);
        let (data, scale) = encode_matrix(format, &Random(15).values(n * k), n, k);
        let shift = |up: u8| scale.iter().map(|byte| byte + up).collect::<Vec<_>>();
        let x = act_values(&mut Random(16), 3 * k);
        let product = |up: u8| {
            let stored = StoredMatrix::new(format, n, k, data.clone().into(), shift(up).into());
            let w = device.matrix(stored).expect("a weight");
            f32_product(device, &x, &w, n, 3)
        };
        let (plain, large) = (product(0), product(40));
        for (plain, large) in plain.iter().zip(&large) {
            assert_eq!(plain * 2f32.powi(40), *large, "{format:?}");
        }
        all.extend(common::bits(&large));
    }
    all
}

/// The code of NaN makes NaN of what it is multiplied into, and of nothing else.
fn nan_codes_are_nan<D: Device>(device: &D) -> Vec<u32> {
    for format in [Format::Fp8Block32, Format::Fp8Row32] {
        let (n, k, bad) = (40, 64, 17);
        let (mut data, scale) = encode_matrix(format, &Random(18).values(n * k), n, k);
        for code in [0x7F, 0xFF] {
            data[bad * k + 5] = code;
            let stored = StoredMatrix::new(format, n, k, data.clone().into(), scale.clone().into());
            let w = device.matrix(stored).expect("a weight");
            let got = f32_product(device, &act_values(&mut Random(19), 2 * k), &w, n, 2);
            for (i, x) in got.iter().enumerate() {
                assert_eq!(x.is_nan(), i % n == bad, "{format:?}: output {i} is {x}");
            }
        }
    }
    Vec::new()
}
