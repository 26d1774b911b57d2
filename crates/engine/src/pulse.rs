//! A sign of life from inside a step.

use crate::model::{Indexer, Probe, Scratch};
use deepinfer_device::Device;
use deepinfer_device::ops::Result;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts what a step gets done, several times a layer: a step may take long, but one that stops
/// counting hangs. On a GPU, where operations are only handed over, the count runs ahead of them.
#[derive(Debug, Default)]
pub struct Pulse(AtomicU64);

impl Pulse {
    /// Something was done.
    pub fn beat(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// How much was done so far.
    pub fn beats(&self) -> u64 {
        self.0.load(Relaxed)
    }

    fn beaten(&self) -> Result<()> {
        self.beat();
        Ok(())
    }
}

/// Beats after everything of a layer that may read weights from a disk.
impl<D: Device> Probe<D> for &Pulse {
    fn before_layer(&mut self, _: &D, _: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.beaten()
    }

    fn after_memory(&mut self, _: &D, _: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.beaten()
    }

    fn window_keys(&mut self, _: &D, _: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.beaten()
    }

    fn selected(
        &mut self,
        _: &D,
        _: usize,
        _: usize,
        _: &Indexer<D>,
        _: &mut Scratch<D>,
    ) -> Result<()> {
        self.beaten()
    }

    fn attention_out(&mut self, _: &D, _: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.beaten()
    }

    fn routed(&mut self, _: &D, _: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.beaten()
    }

    fn experts_out(&mut self, _: &D, _: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.beaten()
    }

    fn hidden(&mut self, _: &D, _: usize, _: &mut D::Buffer<D::Act>) -> Result<()> {
        self.beaten()
    }
}
