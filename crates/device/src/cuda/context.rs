//! The driver: devices, a context with its stream, and errors.

use super::branches::Lanes;
use crate::error::DeviceError;
use crate::ops::Result;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The oldest architecture with the instructions that the kernels use.
const OLDEST: (i32, i32) = (8, 0);

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// Number by which it is opened.
    pub ordinal: usize,
    /// The maker's name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Bytes of memory.
    pub memory: usize,
    /// Multiprocessors.
    pub multiprocessors: usize,
}

impl CudaDevice {
    /// Whether the kernels run on it.
    pub fn is_supported(&self) -> bool {
        self.capability >= OLDEST
    }
}

/// A result of the driver, as an error that names what was tried.
pub(super) fn check(operation: &'static str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the driver is loaded, since it has given a result.
    let known = unsafe { sys::cuGetErrorString(result, &mut text) };
    let text = if known == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: the driver's texts are static strings.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown error".to_owned()
    };
    Err(DeviceError::Driver { operation, error: format!("{result:?}: {text}") })
}

/// Loads and starts the driver.
fn start() -> Result<()> {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: opening the driver's library runs its initializers, which do nothing of note.
    if !PRESENT.get_or_init(|| unsafe { sys::is_culib_present() }) {
        return Err(DeviceError::NoDriver);
    }
    // SAFETY: the library is there.
    check("starting the CUDA driver", unsafe { sys::cuInit(0) })
}

/// A number that the driver knows about a device.
fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: `device` comes from the driver.
    let result = unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) };
    check("asking for a device attribute", result)?;
    Ok(value)
}

fn describe(ordinal: usize) -> Result<(sys::CUdevice, CudaDevice)> {
    use sys::CUdevice_attribute as Attribute;
    let (mut device, mut memory, mut name) = (0, 0, [0u8; 256]);
    // SAFETY: the driver is started; `name` is as long as said.
    unsafe {
        check("asking for a device", sys::cuDeviceGet(&mut device, ordinal as i32))?;
        check("asking for a device's memory", sys::cuDeviceTotalMem_v2(&mut memory, device))?;
        let result = sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32 - 1, device);
        check("asking for a device's name", result)?;
    }
    let name = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy).unwrap_or_default();
    let major = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    let minor = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
    let count = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let info = CudaDevice {
        ordinal,
        name: name.into_owned(),
        capability: (attribute(device, major)?, attribute(device, minor)?),
        memory,
        multiprocessors: attribute(device, count)? as usize,
    };
    Ok((device, info))
}

fn count() -> Result<usize> {
    start()?;
    let mut count = 0;
    // SAFETY: the driver is started.
    check("counting devices", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count as usize)
}

pub(super) fn devices() -> Result<Vec<CudaDevice>> {
    (0..count()?).map(|ordinal| Ok(describe(ordinal)?.1)).collect()
}

/// A device's primary context, the stream that everything runs in, and those of branches.
pub(super) struct Context {
    pub(super) info: CudaDevice,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    pub(super) lanes: Lanes,
    /// Whether a step of the model runs.
    in_step: AtomicBool,
}

// SAFETY: contexts and streams may be used by any thread, several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(ordinal: usize) -> Result<Self> {
        let count = count()?;
        if ordinal >= count {
            return Err(DeviceError::NoDevice { ordinal, count });
        }
        let (device, info) = describe(ordinal)?;
        if !info.is_supported() {
            let (major, minor) = info.capability;
            return Err(DeviceError::TooOld { name: info.name, major, minor });
        }
        let mut context = null_mut();
        // SAFETY: `device` comes from the driver.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) };
        check("creating a context", result)?;
        let in_step = AtomicBool::new(false);
        let lanes = Lanes::default();
        let mut this = Self { info, device, context, stream: null_mut(), lanes, in_step };
        this.bind()?;
        this.stream = new_stream()?;
        this.lanes.open()?;
        Ok(this)
    }

    /// Makes the context current in this thread, as most calls of the driver need.
    pub(super) fn bind(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        check("making a context current", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// The stream that operations go to now: that of a branch while one is recorded.
    pub(super) fn stream(&self) -> sys::CUstream {
        self.lanes.current().unwrap_or(self.stream)
    }

    /// Runs `f`, during which nothing may wait for the GPU, allocate or upload.
    pub(super) fn step(&self, f: impl FnOnce() -> Result<()>) -> Result<()> {
        self.in_step.store(true, Relaxed);
        self.lanes.reset();
        let _end = EndOfStep(&self.in_step);
        f()
    }

    /// Whether a step is recorded.
    pub(super) fn inside_step(&self) -> bool {
        self.in_step.load(Relaxed)
    }

    /// Refuses what must not happen inside a step.
    pub(super) fn outside_step(&self, operation: &'static str) -> Result<()> {
        if self.inside_step() {
            return Err(DeviceError::InsideStep { operation });
        }
        Ok(())
    }

    /// Waits for all that was asked so far.
    pub(super) fn sync(&self) -> Result<()> {
        self.outside_step("waiting for the GPU")?;
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        check("waiting for the GPU", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    pub(super) fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: a context is current.
        check("asking for free memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut all) })?;
        Ok((free, all))
    }

    pub(super) fn time(&self, f: impl FnOnce() -> Result<()>) -> Result<f32> {
        let (start, end) = (Event::new(self)?, Event::new(self)?);
        start.record(self)?;
        f()?;
        end.record(self)?;
        end.wait()?;
        Ok((elapsed(&start, &end)? * 1e3) as f32)
    }
}

/// Ends a step, also where it panics.
struct EndOfStep<'a>(&'a AtomicBool);

impl Drop for EndOfStep<'_> {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        self.lanes.close();
        // SAFETY: nobody else has the stream; the context was retained once. What the driver says
        // at the end cannot be helped.
        unsafe {
            if !self.stream.is_null() {
                let _ = sys::cuStreamSynchronize(self.stream);
                let _ = sys::cuStreamDestroy_v2(self.stream);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// A point in the stream that can be waited for.
pub(super) struct Event {
    event: sys::CUevent,
}

// SAFETY: events may be used by any thread.
unsafe impl Send for Event {}

/// A new stream of the current context, which no other one waits for.
pub(super) fn new_stream() -> Result<sys::CUstream> {
    let mut stream = null_mut();
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the driver is started; it says if no context is current.
    check("creating a stream", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
    Ok(stream)
}

impl Event {
    pub(super) fn new(context: &Context) -> Result<Self> {
        context.bind()?;
        let mut event = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: a context is current.
        check("creating an event", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Self { event })
    }

    /// Moves the event to this point of the stream; inside a recorded step, whenever that runs.
    pub(super) fn record(&self, context: &Context) -> Result<()> {
        context.bind()?;
        let flags = match context.inside_step() {
            true => sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL,
            false => sys::CUevent_record_flags::CU_EVENT_RECORD_DEFAULT,
        };
        let stream = context.stream();
        // SAFETY: event and stream are of the same context.
        let result = unsafe { sys::cuEventRecordWithFlags(self.event, stream, flags as u32) };
        check("recording an event", result)
    }

    /// Waits until the GPU has passed the event.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: the event lives as long as `self`.
        check("waiting for an event", unsafe { sys::cuEventSynchronize(self.event) })
    }
}

/// Seconds between two events that have happened.
pub(super) fn elapsed(from: &Event, to: &Event) -> Result<f64> {
    let mut milliseconds = 0.0;
    // SAFETY: both events live; the driver says if one was not recorded or has not happened.
    let result = unsafe { sys::cuEventElapsedTime(&mut milliseconds, from.event, to.event) };
    check("reading a time", result)?;
    Ok(f64::from(milliseconds) / 1e3)
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has the event.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}
