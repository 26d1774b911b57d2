//! What the tests of operations share. A test body is written once over `D: Device`.
#![allow(dead_code)]

use deepinfer_device::cpu::Isa;
use deepinfer_device::ops::RowMap;
use deepinfer_device::{Cpu, Cuda, Device, DeviceError, Element, RowFormat};
use std::ops::Range;
use std::sync::OnceLock;

/// Row counts at which results must not change.
pub const ROWS: [usize; 16] = [1, 2, 5, 6, 7, 9, 10, 11, 16, 17, 18, 19, 127, 128, 129, 512];

/// Every CPU that must give the same bits: instruction sets and thread counts.
pub fn cpus() -> Vec<(String, Cpu)> {
    let kinds = Isa::available().flat_map(|isa| [1, 2].map(|threads| (isa, threads)));
    kinds
        .map(|(isa, threads)| {
            let cpu = Cpu::with_isa(Some(threads), isa).expect("threads start");
            (format!("{isa:?}, {threads} threads"), cpu)
        })
        .collect()
}

/// The first GPU, if this machine has one.
pub fn cuda() -> Option<&'static Cuda> {
    static CUDA: OnceLock<Option<Cuda>> = OnceLock::new();
    let open = || match Cuda::open(0) {
        Ok(cuda) => {
            println!("on {:?} too", cuda.info());
            Some(cuda)
        }
        Err(error @ (DeviceError::NoDriver | DeviceError::NoDevice { .. })) => {
            println!("not on CUDA: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    };
    CUDA.get_or_init(open).as_ref()
}

/// Runs `fn body<D: Device>(device: &D) -> Vec<u32>` on every device; CPUs must return equal bits,
/// and a GPU the same ones each time.
#[macro_export]
macro_rules! for_each_device {
    ($body:ident) => {{
        let mut first: Option<Vec<u32>> = None;
        for (name, cpu) in $crate::common::cpus() {
            let bits = $body(&cpu);
            let want = first.get_or_insert_with(|| bits.clone());
            assert!(*want == bits, "{}: other bits on {name}", stringify!($body));
        }
        $crate::on_cuda!($body);
    }};
}

/// The same on the GPU alone.
#[macro_export]
macro_rules! on_cuda {
    ($body:ident) => {{
        if let Some(cuda) = $crate::common::cuda() {
            let once = $body(cuda);
            assert!(once == $body(cuda), "{}: other bits the second time", stringify!($body));
        }
    }};
}

/// Elements behind an output that must stay as they are.
const GUARD: usize = 67;

/// Elements with a value that no operation produces by chance.
pub trait Poison: Element {
    const POISON: Self;
}
impl Poison for f32 {
    const POISON: f32 = -77_824.0;
}
impl Poison for u32 {
    const POISON: u32 = 0xdead_beef;
}
impl Poison for u64 {
    const POISON: u64 = 0xdead_beef;
}
impl Poison for u8 {
    const POISON: u8 = 0xa5;
}

/// A buffer with these elements.
pub fn buffer<D: Device, E: Element>(device: &D, host: &[E]) -> D::Buffer<E> {
    let mut buffer = device.alloc(host.len()).expect("fits");
    device.upload(host, &mut buffer, 0).expect("uploads");
    buffer
}

/// Activations.
pub fn act<D: Device>(device: &D, host: &[f32]) -> D::Buffer<D::Act> {
    let mut buffer = device.alloc(host.len()).expect("fits");
    device.upload_act(host, &mut buffer, 0).expect("uploads");
    buffer
}

/// A poisoned output of `len` elements, with a guard behind it.
pub fn output<D: Device, E: Poison>(device: &D, len: usize) -> D::Buffer<E> {
    buffer(device, &vec![E::POISON; len + GUARD])
}

/// The same for activations.
pub fn output_act<D: Device>(device: &D, len: usize) -> D::Buffer<D::Act> {
    act(device, &vec![f32::POISON; len + GUARD])
}

/// Activations to be changed in place, with a guard behind them.
pub fn in_place<D: Device>(device: &D, host: &[f32]) -> D::Buffer<D::Act> {
    let mut buffer = output_act(device, host.len());
    device.upload_act(host, &mut buffer, 0).expect("uploads");
    buffer
}

/// The elements of an output; the guard must be untouched.
pub fn read<D: Device, E: Poison>(device: &D, buffer: &D::Buffer<E>) -> Vec<E> {
    let mut host = vec![E::default(); device.len(buffer)];
    device.download(buffer, 0, &mut host).expect("downloads");
    let guard = host.split_off(host.len() - GUARD);
    assert!(guard.iter().all(|x| *x == E::POISON), "wrote behind the output");
    host
}

/// The same for activations.
pub fn read_act<D: Device>(device: &D, buffer: &D::Buffer<D::Act>) -> Vec<f32> {
    let mut host = vec![0.0; device.len(buffer)];
    device.download_act(buffer, 0, &mut host).expect("downloads");
    let guard = host.split_off(host.len() - GUARD);
    assert!(guard.iter().all(|x| *x == f32::POISON), "wrote behind the output");
    host
}

/// Bits of floats.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Runs `f` over ranges of `total` rows: a row's values must be the same bits in every range.
/// `f` returns the values of its rows, as many for each row. Returns those of all rows.
pub fn same_in_any_batch(total: usize, f: impl Fn(Range<usize>) -> Vec<u32>) -> Vec<u32> {
    let all = f(0..total);
    let width = all.len() / total;
    let check = |range: Range<usize>| {
        let want = &all[range.start * width..range.end * width];
        assert!(f(range.clone()) == want, "rows {range:?} differ from the same of {total}");
    };
    ROWS.into_iter().filter(|n| *n <= total).for_each(|n| check(0..n));
    ROWS.into_iter().filter(|n| *n < total).for_each(|n| check(total - n..total));
    [0, 1, total / 2, total - 1].into_iter().for_each(|i| check(i..i + 1));
    all
}

/// Greatest error allowed of an output of size about 1: rounding of activations, and `f32` sums.
pub fn tolerance<D: Device>() -> f64 {
    if size_of::<D::Act>() == 2 { 8e-3 } else { 2e-6 }
}

/// Compares with a reference; errors count relative to numbers above 1.
pub fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs() / want.abs().max(1.0);
        assert!(error <= tolerance, "value {i} is {got}, not {want} (error {error:e})");
    }
}

/// Random numbers for inputs.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn word(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32 ^ (self.0 >> 59) as u32
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.word() as usize % n
    }

    /// About normal, times `scale`; exact in bf16, so that every device gets the same input.
    pub fn normal(&mut self, scale: f32) -> f32 {
        let sum: f32 = (0..6).map(|_| self.word() as f32 / 4_294_967_296.0 - 0.5).sum();
        half::bf16::from_f32(sum * 1.4 * scale).to_f32()
    }

    pub fn normals(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal(scale)).collect()
    }
}

/// Rows `range` of an array of rows.
pub fn rows_of<'a, E>(x: &'a [E], width: usize, range: &Range<usize>) -> &'a [E] {
    &x[range.start * width..range.end * width]
}

/// Rows of `width` values, rounded to `format` and stored.
pub fn encoded(x: &[f32], width: usize, format: RowFormat) -> Vec<u8> {
    let mut out = Vec::new();
    for row in x.chunks_exact(width) {
        let mut bytes = vec![0; format.row_bytes(width)];
        deepinfer_device::formats::encode_row(format, row, &mut bytes);
        out.extend(bytes);
    }
    out
}

/// What stored rows hold.
pub fn decoded(bytes: &[u8], width: usize, format: RowFormat) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / format.row_bytes(width) * width];
    for (row, bytes) in out.chunks_exact_mut(width).zip(bytes.chunks_exact(format.row_bytes(width)))
    {
        deepinfer_device::formats::decode_row(format, bytes, row);
    }
    out
}

/// A step of several sequences on the host.
#[derive(Clone, Default)]
pub struct HostMap {
    pub sequence: Vec<u32>,
    pub position: Vec<u32>,
    pub window_from: Vec<u32>,
    pub window_to: Vec<u32>,
    pub fresh_from: Vec<u32>,
    pub first_row: Vec<u32>,
    pub slot: Vec<u32>,
    pub pages: Vec<u32>,
    pub max_pages: usize,
}

impl HostMap {
    /// Adds `rows` rows of a sequence, the first at position `from`, with a causal window.
    pub fn push(&mut self, from: usize, rows: usize, window: usize, slot: u32, pages: &[u32]) {
        let sequence = self.slot.len() as u32;
        assert!(self.slot.is_empty() || pages.len() == self.max_pages);
        self.max_pages = pages.len();
        self.pages.extend(pages);
        self.slot.push(slot);
        self.fresh_from.push(from as u32);
        self.first_row.push(self.sequence.len() as u32);
        for p in from..from + rows {
            self.sequence.push(sequence);
            self.position.push(p as u32);
            self.window_from.push((p + 1).saturating_sub(window) as u32);
            self.window_to.push(p as u32 + 1);
        }
    }

    pub fn upload<D: Device>(&self, device: &D) -> RowMap<D> {
        RowMap {
            rows: self.sequence.len(),
            sequences: self.slot.len(),
            sequence: buffer(device, &self.sequence),
            position: buffer(device, &self.position),
            window_from: buffer(device, &self.window_from),
            window_to: buffer(device, &self.window_to),
            fresh_from: buffer(device, &self.fresh_from),
            first_row: buffer(device, &self.first_row),
            slot: buffer(device, &self.slot),
            pages: buffer(device, &self.pages),
            max_pages: self.max_pages,
        }
    }
}
