//! Saving, restoring and copying what belongs to a sequence. One pair of functions for slots and
//! one for pages serves preemption, prefix cache, forks and transfer between processes.

use super::{Caches, SourceCache};
use deepinfer_device::ops::Result;
use deepinfer_device::{Device, Element};

/// A sequence's state on the host: what its slot and its pages held at `position` tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Tokens that had been run.
    pub position: u32,
    /// Earliest position at which an entry of the prefix cache can be cut; 0 elsewhere.
    pub lowest: usize,
    /// Rings and pending rows.
    pub slot: Vec<u8>,
    /// Pages, in the order of the page table.
    pub pages: Vec<Vec<u8>>,
}

impl<D: Device> Caches<D> {
    /// Bytes that a slot holds: rings of all layers and draft stages, pending rows.
    pub fn slot_bytes(&self) -> usize {
        let ring = self.ring_bytes();
        let pending: usize = self.sources().map(|s| self.pending_floats(s) * 4).sum();
        (self.windows.len() + self.draft_windows.len()) * ring + pending
    }

    /// Bytes that a page holds, over all layers.
    pub fn page_bytes(&self) -> usize {
        self.sources().map(|s| self.page_row_bytes(s).iter().sum::<usize>()).sum()
    }

    /// Copies `slot` and `pages` to the host.
    pub fn snapshot(
        &self,
        device: &D,
        slot: u32,
        pages: &[u32],
        position: u32,
    ) -> Result<Snapshot> {
        let mut out = Snapshot { position, ..Snapshot::default() };
        let ring = self.ring_bytes();
        for buffer in self.windows.iter().chain(&self.draft_windows) {
            download(device, buffer, slot as usize * ring, ring, &mut out.slot)?;
        }
        for source in self.sources() {
            if let Some(pending) = &source.pending {
                let len = self.pending_floats(source);
                let mut floats = vec![0.0f32; len];
                device.download(pending, slot as usize * len, &mut floats)?;
                out.slot.extend(floats.iter().flat_map(|x| x.to_le_bytes()));
            }
        }
        for &page in pages {
            out.pages.push(self.save_page(device, page)?);
        }
        Ok(out)
    }

    /// Puts a snapshot back, into a slot and pages that may be others than it came from.
    ///
    /// # Panics
    /// If the snapshot comes from caches of other sizes or has another number of pages.
    pub fn restore(
        &mut self,
        device: &D,
        snapshot: &Snapshot,
        slot: u32,
        pages: &[u32],
    ) -> Result<()> {
        assert_eq!(snapshot.slot.len(), self.slot_bytes(), "snapshot of other caches");
        assert_eq!(snapshot.pages.len(), pages.len(), "pages to restore");
        let ring = self.ring_bytes();
        let mut bytes = snapshot.slot.as_slice();
        for buffer in self.windows.iter_mut().chain(&mut self.draft_windows) {
            let (head, rest) = bytes.split_at(ring);
            device.upload(head, buffer, slot as usize * ring)?;
            bytes = rest;
        }
        let (head_dim, geometry) = (self.geometry.head_dim, self.geometry.clone());
        for source in self.sources.iter_mut().flatten() {
            if let Some(pending) = &mut source.pending {
                let len = geometry.pending_len(source.ratio) * 2 * head_dim;
                let (head, rest) = bytes.split_at(len * 4);
                let floats: Vec<f32> = head
                    .chunks_exact(4)
                    .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                    .collect();
                device.upload(&floats, pending, slot as usize * len)?;
                bytes = rest;
            }
        }
        for (&page, bytes) in pages.iter().zip(&snapshot.pages) {
            self.load_page(device, page, bytes)?;
        }
        Ok(())
    }

    /// Copies a page to the host.
    pub fn save_page(&self, device: &D, page: u32) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(self.page_bytes());
        for source in self.sources() {
            let [rows, keys] = self.page_row_bytes(source);
            download(device, &source.rows, page as usize * rows, rows, &mut out)?;
            download(device, &source.keys, page as usize * keys, keys, &mut out)?;
        }
        Ok(out)
    }

    /// Fills a page from what [`Caches::save_page`] returned.
    ///
    /// # Panics
    /// If `bytes` is not [`Caches::page_bytes`] long.
    pub fn load_page(&mut self, device: &D, page: u32, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len(), self.page_bytes(), "page of other caches");
        let mut bytes = bytes;
        let sizes: Vec<_> = self.sources().map(|s| self.page_row_bytes(s)).collect();
        for (source, [rows, keys]) in self.sources.iter_mut().flatten().zip(sizes) {
            let (head, rest) = bytes.split_at(rows);
            device.upload(head, &mut source.rows, page as usize * rows)?;
            let (head, rest) = rest.split_at(keys);
            device.upload(head, &mut source.keys, page as usize * keys)?;
            bytes = rest;
        }
        Ok(())
    }

    /// Copies a slot to another one, on the device.
    pub fn copy_slot(&mut self, device: &D, from: u32, to: u32) -> Result<()> {
        let ring = self.ring_bytes();
        for buffer in self.windows.iter_mut().chain(&mut self.draft_windows) {
            copy_unit(device, buffer, from, to, ring)?;
        }
        let (head_dim, geometry) = (self.geometry.head_dim, self.geometry.clone());
        for source in self.sources.iter_mut().flatten() {
            if let Some(pending) = &mut source.pending {
                let len = geometry.pending_len(source.ratio) * 2 * head_dim;
                copy_unit(device, pending, from, to, len)?;
            }
        }
        Ok(())
    }

    /// Copies a page to another one, on the device.
    pub fn copy_page(&mut self, device: &D, from: u32, to: u32) -> Result<()> {
        let sizes: Vec<_> = self.sources().map(|s| self.page_row_bytes(s)).collect();
        for (source, [rows, keys]) in self.sources.iter_mut().flatten().zip(sizes) {
            copy_unit(device, &mut source.rows, from, to, rows)?;
            copy_unit(device, &mut source.keys, from, to, keys)?;
        }
        Ok(())
    }

    fn sources(&self) -> impl Iterator<Item = &SourceCache<D>> {
        self.sources.iter().flatten()
    }

    fn ring_bytes(&self) -> usize {
        self.ring_len * self.formats.window.row_bytes(self.geometry.head_dim)
    }

    fn pending_floats(&self, source: &SourceCache<D>) -> usize {
        match source.pending {
            Some(_) => self.geometry.pending_len(source.ratio) * 2 * self.geometry.head_dim,
            None => 0,
        }
    }

    /// Bytes of a page of compressed rows and of a page of index keys.
    fn page_row_bytes(&self, source: &SourceCache<D>) -> [usize; 2] {
        let rows = self.geometry.rows_per_page(source.ratio);
        [
            rows * self.formats.compressed.row_bytes(self.geometry.head_dim),
            rows * self.formats.index.row_bytes(self.geometry.index_dim),
        ]
    }
}

fn download<D: Device>(
    device: &D,
    buffer: &D::Buffer<u8>,
    offset: usize,
    len: usize,
    out: &mut Vec<u8>,
) -> Result<()> {
    let at = out.len();
    out.resize(at + len, 0);
    device.download(buffer, offset, &mut out[at..])
}

fn copy_unit<D: Device, E: Element>(
    device: &D,
    buffer: &mut D::Buffer<E>,
    from: u32,
    to: u32,
    len: usize,
) -> Result<()> {
    if from == to {
        return Ok(());
    }
    device.copy_within(buffer, from as usize * len, to as usize * len, len)
}
