//! Linear layers: the same bits for every row count, thread count and instruction set; right
//! against f64.

use bytes::Bytes;
use deepinfer_device::cpu::linear::{Weight, grouped_linear, linear, linear_f32};
use deepinfer_device::cpu::{Cpu, Isa};
use deepinfer_device::formats::{dequantize_matrix_row, encode_matrix};
use deepinfer_device::{Format, StoredMatrix};
use proptest::prelude::*;

const FORMATS: [Format; 5] =
    [Format::F32, Format::Bf16, Format::Fp8Block32, Format::Fp4Row32, Format::Fp8Row32];
const ROWS: [usize; 11] = [1, 2, 5, 6, 7, 16, 17, 127, 128, 129, 512];

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
