//! Marks in the work of a device, by layer and by kernel.

use super::timed::Timed;
use deepinfer::model::{Probe, Scratch};
use deepinfer_device::ops::Result;
use serde::Serialize;
use std::collections::BTreeMap;

/// An operation of a layer, all its kernels.
#[derive(Clone, Debug, Serialize)]
pub struct OperationTime {
    pub name: String,
    pub seconds: f64,
    pub kernels: usize,
}

/// Where a piece of a step belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The n-gram memory of a layer.
    Memory(usize),
    /// The rest of it.
    Layer(usize),
}

/// Kernels of a place.
struct Kernels<M> {
    place: Place,
    before: M,
    /// Names, and the marks behind each.
    marks: Vec<(String, M)>,
}

/// Marks where layers and their n-gram memories begin and end.
pub struct Marks<D: Timed> {
    marks: Vec<(Option<Place>, D::Mark)>,
    /// Kernels of each place, if they are wanted.
    kernels: Option<Vec<Kernels<D::Mark>>>,
    /// Before the kernels of the current place.
    before: Option<D::Mark>,
}

impl<D: Timed> Marks<D> {
    /// No marks yet; `kernels`: also one behind each kernel.
    pub fn new(kernels: bool) -> Self {
        Self { marks: Vec::new(), kernels: kernels.then(Vec::new), before: None }
    }

    /// No marks yet of the same kind.
    pub fn like(&self) -> Self {
        Self::new(self.kernels.is_some())
    }

    /// What lies between the last mark and this one is of `place`.
    pub fn mark(&mut self, d: &D, place: Option<Place>) -> Result<()> {
        if let Some(kernels) = &mut self.kernels {
            let marks = d.traced();
            if let (Some(place), Some(before)) = (place, self.before.take()) {
                kernels.push(Kernels { place, before, marks });
            }
            self.before = Some(d.mark()?);
            d.trace();
        }
        self.marks.push((place, d.mark()?));
        Ok(())
    }

    /// Whether nothing was marked: a recorded step passes the marks that were recorded with it.
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }

    /// Seconds by place, and from the first mark to `end`.
    pub fn seconds(&self, d: &D, end: &D::Mark) -> Result<(BTreeMap<Place, f64>, f64)> {
        let mut places = BTreeMap::new();
        for pair in self.marks.windows(2) {
            let seconds = d.between(&pair[0].1, &pair[1].1)?;
            if let Some(place) = pair[1].0 {
                *places.entry(place).or_default() += seconds;
            }
        }
        let all = self.marks.first().map_or(Ok(0.0), |(_, first)| d.between(first, end))?;
        Ok((places, all))
    }

    /// Operations by place.
    pub fn operations(&self, d: &D) -> Result<BTreeMap<Place, Vec<OperationTime>>> {
        let mut places: BTreeMap<Place, Vec<OperationTime>> = BTreeMap::new();
        for Kernels { place, before, marks } in self.kernels.iter().flatten() {
            let operations = places.entry(*place).or_default();
            let mut before = before;
            for (name, mark) in marks {
                let seconds = d.between(before, mark)?;
                add(operations, name, seconds, 1);
                before = mark;
            }
        }
        Ok(places)
    }
}

/// Adds to the operation of that name.
pub fn add(operations: &mut Vec<OperationTime>, name: &str, seconds: f64, kernels: usize) {
    match operations.iter_mut().find(|o| o.name == name) {
        Some(o) => (o.seconds, o.kernels) = (o.seconds + seconds, o.kernels + kernels),
        None => operations.push(OperationTime { name: name.to_owned(), seconds, kernels }),
    }
}

impl<D: Timed> Probe<D> for Marks<D> {
    fn before_layer(&mut self, d: &D, _: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.mark(d, None)
    }

    fn after_memory(&mut self, d: &D, layer: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.mark(d, Some(Place::Memory(layer)))
    }

    fn after_layer(&mut self, d: &D, layer: usize, _: usize, _: &mut Scratch<D>) -> Result<()> {
        self.mark(d, Some(Place::Layer(layer)))
    }
}
