//! CUDA graphs: a series of kernels that the driver launches as one.
//!
//! A series runs operation by operation when its key is new, which loads its kernels and grows the
//! scratch memory to what it needs; the second time it is recorded; from then on it is launched.

use super::Cuda;
use super::context::{Context, check};
use super::lock;
use crate::ops::{GraphKey, Result};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::Arc;

/// Most graphs that are kept; one of the released model takes a few megabytes.
const MOST: usize = 64;
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

struct Entry {
    graph: Option<Graph>,
    /// The last call.
    used: u64,
}

impl Graphs {
    /// Makes room for one more graph.
    fn make_room(&mut self) {
        let recorded = self.entries.iter().filter(|(_, entry)| entry.graph.is_some());
        if recorded.clone().count() >= MOST
            && let Some((&key, _)) = recorded.min_by_key(|(_, entry)| entry.used)
        {
            self.entries.remove(&key);
        }
        if self.entries.len() >= MOST_KEYS {
            self.entries.retain(|_, entry| entry.graph.is_some());
        }
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
    f: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let scratch = lock(&cuda.scratch).generation();
    if graphs.scratch != scratch {
        *graphs = Graphs { scratch, ..Graphs::default() };
    }
    graphs.now += 1;
    let used = graphs.now;
    match graphs.entries.get_mut(&key) {
        Some(entry) => {
            entry.used = used;
            if let Some(graph) = &entry.graph {
                return graph.launch();
            }
            let graph = Graph::record(&cuda.context, f)?;
            graph.launch()?;
            graphs.make_room();
            graphs.entries.insert(key, Entry { graph: Some(graph), used });
            Ok(())
        }
        None => {
            f()?;
            graphs.make_room();
            graphs.entries.insert(key, Entry { graph: None, used });
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::DeviceError;
    use crate::ops::Device;

    #[test]
    fn room_is_made_for_the_newest() {
        let mut graphs = Graphs::default();
        for i in 0..2 * MOST_KEYS as u32 {
            graphs.make_room();
            graphs.entries.insert([i, 0, 0, 0], Entry { graph: None, used: u64::from(i) });
        }
        assert!(graphs.entries.len() <= MOST_KEYS);
    }

    #[test]
    fn nothing_waits_or_allocates_inside_a_recorded_step() {
        let Some(cuda) = crate::cuda::test_gpu() else { return };
        let buffer = cuda.alloc::<f32>(4).expect("allocates");
        let waits = || cuda.sync();
        let allocates = || cuda.alloc::<f32>(4).map(drop);
        let downloads = || cuda.download(&buffer, 0, &mut [0.0; 4]);
        let steps: [&dyn Fn() -> Result<()>; 3] = [&waits, &allocates, &downloads];
        for step in steps {
            let refused = Graph::record(&cuda.context, step).err();
            assert!(matches!(refused, Some(DeviceError::InsideStep { .. })), "{refused:?}");
            // The stream is as good as ever.
            cuda.sync().expect("it waits");
        }
    }
}
