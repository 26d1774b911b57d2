//! CUDA graphs: a series of kernels that the driver launches as one.
//!
//! A series runs operation by operation when its key is new, which loads its kernels and grows the
//! scratch memory to what it needs; the second time it is recorded; from then on it is launched. What
//! cannot be recorded goes on running operation by operation.

use super::Cuda;
use super::context::{Context, check};
use crate::ops::{GraphKey, Result};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::Arc;

/// Most graphs that are kept; one of the released model takes a few megabytes.
const MOST: usize = 96;
/// A graph that was not launched in so many calls makes room for another. Recording costs as much as
/// many plain runs: graphs must not take turns.
const UNUSED: u64 = 4096;
/// Most keys that are remembered.
const MOST_KEYS: usize = 4096;

/// Recorded series, by key.
#[derive(Default)]
pub struct Graphs {
    entries: HashMap<GraphKey, Entry>,
    /// Counts calls.
    now: u64,
    /// The scratch memory that the recorded kernels use.
    scratch: u64,
}

#[derive(Default)]
struct Entry {
    graph: Option<Graph>,
    /// The last call.
    used: u64,
    /// Whether recording it has failed.
    refused: bool,
}

impl Graphs {
    /// Graphs that are kept.
    pub fn recorded(&self) -> usize {
        self.entries.values().filter(|entry| entry.graph.is_some()).count()
    }

    /// Whether there is room for one more graph; makes it where one is not used any more.
    fn make_room(&mut self) -> bool {
        if self.recorded() < MOST {
            return true;
        }
        let recorded = self.entries.values_mut().filter(|entry| entry.graph.is_some());
        let Some(oldest) = recorded.min_by_key(|entry| entry.used) else { return false };
        if self.now - oldest.used < UNUSED {
            return false;
        }
        oldest.graph = None;
        true
    }

    /// The entry of a key, and whether it is new.
    fn entry(&mut self, key: GraphKey) -> (&mut Entry, bool) {
        let new = !self.entries.contains_key(&key);
        if new && self.entries.len() >= MOST_KEYS {
            self.entries.retain(|_, entry| entry.graph.is_some());
        }
        (self.entries.entry(key).or_default(), new)
    }
}

/// What the driver launches.
struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: a graph may be launched by any thread, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Records the operations of `f`, which do not run.
    fn record(context: &Arc<Context>, f: impl FnOnce() -> Result<()>) -> Result<Self> {
        context.bind()?;
        // Other threads may go on with what is theirs.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the context.
        let result = unsafe { sys::cuStreamBeginCapture_v2(context.stream(), mode) };
        check("beginning to record a step", result)?;
        let recorded = context.step(f);
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: as above; recording ends whatever `f` has said.
        let ended = unsafe { sys::cuStreamEndCapture(context.stream(), &mut graph) };
        let made = recorded.and_then(|()| {
            check("recording a step", ended)?;
            // SAFETY: the graph is whole.
            let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
            check("making a graph of a step", result)
        });
        if !graph.is_null() {
            // SAFETY: the executable does not need it, and nobody else has it.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        made?;
        Ok(Self { context: context.clone(), executable })
    }

    fn launch(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the caller of `Device::replay` keeps the buffers that the kernels use.
        let result = unsafe { sys::cuGraphLaunch(self.executable, self.context.stream()) };
        check("launching a recorded step", result)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.sync().is_ok() {
            // SAFETY: it does not run any more, and nobody else has it.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

pub(super) fn replay(
    cuda: &Cuda,
    graphs: &mut Graphs,
    key: GraphKey,
    mut f: impl FnMut() -> Result<()>,
) -> Result<()> {
    let scratch = cuda.scratch_generation();
    if graphs.scratch != scratch {
        *graphs = Graphs { scratch, ..Graphs::default() };
    }
    graphs.now += 1;
    let now = graphs.now;
    let (entry, new) = graphs.entry(key);
    entry.used = now;
    if let Some(graph) = &entry.graph {
        return graph.launch();
    }
    if new || entry.refused || !graphs.make_room() {
        return f();
    }
    match Graph::record(&cuda.context, &mut f) {
        Ok(graph) => {
            graph.launch()?;
            graphs.entry(key).0.graph = Some(graph);
            Ok(())
        }
        Err(_) => {
            graphs.entry(key).0.refused = true;
            f()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::DeviceError;
    use crate::ops::Device;

    #[test]
    fn keys_do_not_pile_up() {
        let mut graphs = Graphs::default();
        for i in 0..2 * MOST_KEYS as u32 {
            let (entry, new) = graphs.entry([i, 0, 0, 0]);
            assert!(new && entry.graph.is_none());
            assert!(!graphs.entry([i, 0, 0, 0]).1);
        }
        assert!(graphs.entries.len() <= MOST_KEYS && graphs.make_room());
    }

    /// The first run is plain, the second is recorded; what cannot be recorded runs all the same.
    #[test]
    fn series_are_recorded_once_where_they_can_be() {
        let Some(cuda) = crate::cuda::test_gpu() else { return };
        let mut graphs = Graphs::default();
        let (from, mut to) = (cuda.alloc::<f32>(4), cuda.alloc::<f32>(4).expect("allocates"));
        let from = from.expect("allocates");
        let (mut copies, mut waits) = (0, 0);
        for _ in 0..5 {
            let copy = || {
                copies += 1;
                cuda.copy(&from, 0, &mut to, 0, 4)
            };
            replay(&cuda, &mut graphs, [1, 0, 0, 0], copy).expect("copies");
            let wait = || {
                waits += 1;
                cuda.sync()
            };
            replay(&cuda, &mut graphs, [2, 0, 0, 0], wait).expect("waits");
        }
        // Recording is tried once.
        assert_eq!((copies, waits, graphs.recorded()), (2, 6, 1));
    }

    /// What a branch writes is there behind its end, whether the series is recorded or not; one that
    /// has no end cannot be recorded.
    #[test]
    fn branches_are_recorded_with_their_series() {
        let Some(cuda) = crate::cuda::test_gpu() else { return };
        let mut graphs = Graphs::default();
        let mut buffers = [0; 4].map(|_| cuda.alloc::<f32>(4).expect("allocates"));
        for (step, joined) in [true, true, true, true, false, false, false].into_iter().enumerate()
        {
            let [from, left, right, to] = &mut buffers;
            let values = [step as f32, 2.0, 3.0, 4.0];
            cuda.upload(&values, from, 0).expect("uploads");
            let series = || {
                let branch = cuda.beside(1, || cuda.copy(from, 0, left, 0, 4))?;
                cuda.copy(from, 0, right, 0, 4)?;
                if joined {
                    cuda.join(branch)?;
                    cuda.copy(left, 0, to, 0, 4)?;
                }
                Ok(())
            };
            replay(&cuda, &mut graphs, [u32::from(joined), 0, 0, 0], series).expect("runs");
            for buffer in if joined { &buffers[1..] } else { &buffers[1..3] } {
                let mut host = [0.0; 4];
                cuda.download(buffer, 0, &mut host).expect("downloads");
                assert_eq!(host, values, "step {step}");
            }
        }
        assert_eq!(graphs.recorded(), 1);
    }

    #[test]
    fn nothing_waits_or_allocates_inside_a_recorded_step() {
        let Some(cuda) = crate::cuda::test_gpu() else { return };
        let buffer = cuda.alloc::<f32>(4).expect("allocates");
        let waits = || cuda.sync();
        let allocates = || cuda.alloc::<f32>(4).map(drop);
        let downloads = || cuda.download(&buffer, 0, &mut [0.0; 4]);
        let uploads = || cuda.upload_bytes(&[1, 2], buffer.head(1));
        let steps: [&dyn Fn() -> Result<()>; 4] = [&waits, &allocates, &downloads, &uploads];
        for step in steps {
            let refused = Graph::record(&cuda.context, step).err();
            assert!(matches!(refused, Some(DeviceError::InsideStep { .. })), "{refused:?}");
            // The stream is as good as ever.
            cuda.sync().expect("it waits");
        }
    }
}
