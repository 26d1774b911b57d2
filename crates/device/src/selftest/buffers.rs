//! Outputs that notice what was not written and what should not have been.

use super::Trouble;
pub(super) use crate::inputs::{HostMap, Random, act, encoded, input, part};
use crate::ops::Device;
use crate::tensor::Element;

/// Elements behind an output that must stay as they are.
const GUARD: usize = 131;
/// Fills activations before an operation.
const POISON: f32 = -77_824.0;

/// An element that no operation produces by chance.
pub(super) trait Pattern: Element {
    const PATTERN: Self;
}
impl Pattern for f32 {
    const PATTERN: f32 = POISON;
}
impl Pattern for u32 {
    const PATTERN: u32 = 0xdead_beef;
}
impl Pattern for u8 {
    const PATTERN: u8 = 0xa5;
}

/// A buffer with these elements and a guard behind them.
pub(super) fn guarded<D: Device, E: Pattern>(
    device: &D,
    host: &[E],
) -> Result<D::Buffer<E>, Trouble> {
    Ok(input(device, &[host, &[E::PATTERN; GUARD]].concat())?)
}

/// An output of `len` elements, filled with the pattern.
pub(super) fn output<D: Device, E: Pattern>(
    device: &D,
    len: usize,
) -> Result<D::Buffer<E>, Trouble> {
    Ok(input(device, &vec![E::PATTERN; len + GUARD])?)
}

/// Activations with a guard behind them.
pub(super) fn guarded_act<D: Device>(
    device: &D,
    host: &[f32],
) -> Result<D::Buffer<D::Act>, Trouble> {
    Ok(act(device, &[host, &[POISON; GUARD]].concat())?)
}

pub(super) fn output_act<D: Device>(device: &D, len: usize) -> Result<D::Buffer<D::Act>, Trouble> {
    guarded_act(device, &vec![POISON; len])
}

/// The elements before the guard.
pub(super) fn read<D: Device, E: Pattern>(
    device: &D,
    buffer: &D::Buffer<E>,
) -> Result<Vec<E>, Trouble> {
    let mut host = vec![E::default(); device.len(buffer)];
    device.download(buffer, 0, &mut host)?;
    let guard = host.split_off(host.len() - GUARD);
    if guard.iter().any(|x| *x != E::PATTERN) {
        return Err(Trouble::Overrun);
    }
    Ok(host)
}

pub(super) fn read_act<D: Device>(
    device: &D,
    buffer: &D::Buffer<D::Act>,
) -> Result<Vec<f32>, Trouble> {
    let mut host = vec![0.0; device.len(buffer)];
    device.download_act(buffer, 0, &mut host)?;
    let guard = host.split_off(host.len() - GUARD);
    if guard.iter().any(|x| *x != POISON) {
        return Err(Trouble::Overrun);
    }
    Ok(host)
}
