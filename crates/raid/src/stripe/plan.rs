//! The plan for the update of a rectangle's parity: the strips to read, and the computation.
//!
//! A pure function of the modified strips and of those that can be read and written. Masks have bit
//! `s` for strip `s` of the stripe: data `0..k`, parity `k..k+m`.

/// The state of a stripe's strips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strips {
    /// Data strips.
    pub data: usize,
    /// Parity strips.
    pub parity: usize,
    /// Strips whose members take writes.
    pub live: u64,
    /// Live strips that can be read in these rows.
    pub readable: u64,
    /// Whether parity fits the data.
    pub is_synced: bool,
}

/// The method that computes parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// No parity strip is live, or the level has none: only data is written.
    Direct,
    /// Every data strip is new.
    Full,
    /// Read-modify-write: old data leaves parity, new data enters it.
    Modify,
    /// Reconstruct-write: parity is computed from all data.
    Reconstruct,
    /// As `Reconstruct`, after unreadable data strips were computed from the others.
    Decode,
    /// As `Decode`, in parts: too many strips are unreadable, but perhaps in different rows.
    Rows,
}

/// The first steps of a rectangle's write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The method for parity.
    pub method: Method,
    /// Strips to read. For [`Method::Decode`] the decoder chooses among them. For [`Method::Rows`]
    /// those whose data is needed.
    pub read: u64,
    /// Data strips to compute from others ([`Method::Decode`] only).
    pub lost: u64,
    /// Parity strips to write.
    pub parity: u64,
    /// Whether strips are compared before parity is computed from them. `read` then contains all
    /// readable strips.
    pub is_checked: bool,
}

/// More strips are missing than parity can reconstruct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeyondRedundancy;

impl Strips {
    /// Data strips as a mask.
    pub fn data_mask(&self) -> u64 {
        u64::MAX >> (64 - self.data)
    }

    /// All strips as a mask.
    pub fn all(&self) -> u64 {
        u64::MAX >> (64 - self.data - self.parity)
    }

    /// Whether a strip has no live member.
    pub fn is_degraded(&self) -> bool {
        self.live != self.all()
    }

    /// Plans the write of the data strips in `modified`.
    ///
    /// Parity that is computed from data that was read would hide a wrong strip permanently.
    /// Read-modify-write preserves such a contradiction. A reconstruct-write compares first if
    /// there is a spare strip. With one spare strip the comparison only detects the contradiction,
    /// which read-modify-write preserves with fewer reads; with two it identifies the wrong strip.
    /// Small writes are read-modify-write: a comparison reads the whole stripe.
    ///
    /// # Errors
    ///
    /// If more members are missing than parity can reconstruct.
    pub fn plan(&self, modified: u64) -> Result<Plan, BeyondRedundancy> {
        let parity = self.live & !self.data_mask();
        let others = self.data_mask() & !modified;
        let plan = |method, read, lost| Ok(Plan { method, read, lost, parity, is_checked: false });
        if (self.all() & !self.live).count_ones() as usize > self.parity {
            return Err(BeyondRedundancy);
        }
        if parity == 0 {
            return plan(Method::Direct, 0, 0);
        }
        if others == 0 {
            return plan(Method::Full, 0, 0);
        }
        let can_modify = self.is_synced && (modified | parity) & !self.readable == 0;
        let can_reconstruct = others & !self.readable == 0;
        let spares = (self.readable.count_ones() as usize).saturating_sub(self.data);
        let is_small = modified.count_ones() == 1 || (modified | parity).count_ones() <= others.count_ones();
        if can_modify && (!can_reconstruct || spares < 2 || is_small) {
            return plan(Method::Modify, modified | parity, 0);
        }
        let is_checked = self.is_synced && spares > 0;
        let checked = |method, lost| Ok(Plan { method, read: self.readable, lost, parity, is_checked });
        match (can_reconstruct, is_checked) {
            (true, true) => checked(Method::Reconstruct, 0),
            (true, false) => plan(Method::Reconstruct, others, 0),
            (false, _) if (self.readable.count_ones() as usize) < self.data => plan(Method::Rows, others, 0),
            (false, _) => checked(Method::Decode, others & !self.readable),
        }
    }
}

/// The strips of a mask.
pub(crate) fn ones(mask: u64) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let strip = (left != 0).then(|| left.trailing_zeros() as usize)?;
        left &= left - 1;
        Some(strip)
    })
}

/// The lowest `count` strips of a mask.
pub(crate) fn lowest(mask: u64, count: usize) -> u64 {
    ones(mask).take(count).fold(0, |lowest, strip| lowest | 1 << strip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strips(data: usize, parity: usize) -> Strips {
        let all = u64::MAX >> (64 - data - parity);
        Strips { data, parity, live: all, readable: all, is_synced: true }
    }

    #[test]
    fn small_writes_and_those_with_one_spare_strip_modify_and_others_compare() {
        let method = |data, parity, modified| strips(data, parity).plan(modified).unwrap().method;
        assert_eq!(method(8, 1, 0b1), Method::Modify);
        assert_eq!(method(8, 2, 0b11), Method::Modify);
        assert_eq!(method(4, 2, 0b1), Method::Modify);
        assert_eq!(method(3, 2, 0b1), Method::Modify);
        assert_eq!(method(8, 1, 0b1111_1110), Method::Modify);
        assert_eq!(method(8, 2, 0b1111), Method::Reconstruct);
        assert!(strips(8, 2).plan(0b1111).unwrap().is_checked);
        assert_eq!(method(8, 1, 0xff), Method::Full);
        assert_eq!(method(1, 2, 1), Method::Full);
        assert_eq!(method(4, 0, 1), Method::Direct);
    }

    #[test]
    fn a_missing_strip_decides() {
        let lose = |strips: Strips, lost: u64| Strips {
            live: strips.live & !lost,
            readable: strips.readable & !lost,
            ..strips
        };
        let raid6 = strips(4, 2);
        let plan = lose(raid6, 0b10).plan(0b1).unwrap();
        assert_eq!((plan.method, plan.read, plan.parity), (Method::Modify, 0b11_0001, 0b11_0000));
        let one = lose(raid6, 0b1).plan(0b1).unwrap();
        assert_eq!((one.method, one.read, one.is_checked), (Method::Reconstruct, 0b11_1110, true));
        let both = lose(raid6, 0b11).plan(0b1).unwrap();
        assert_eq!((both.method, both.read, both.lost), (Method::Decode, 0b11_1100, 0b10));
        assert!(!both.is_checked, "no strip is spare");
        assert_eq!(lose(raid6, 0b11_0000).plan(0b1).unwrap().method, Method::Direct);
        assert_eq!(lose(raid6, 0b111).plan(0b1), Err(BeyondRedundancy));
        assert_eq!(lose(strips(4, 1), 0b1_0000).plan(0b10).unwrap().method, Method::Direct);
    }

    #[test]
    fn old_parity_is_not_used_before_it_fits() {
        let raid5 = Strips { is_synced: false, ..strips(8, 1) };
        let plan = raid5.plan(0b1).unwrap();
        assert_eq!((plan.method, plan.read, plan.is_checked), (Method::Reconstruct, 0b1111_1110, false));
    }

    #[test]
    fn every_plan_reads_only_what_is_readable() {
        for readable in 0..1u64 << 6 {
            for modified in 1..1u64 << 4 {
                for is_synced in [false, true] {
                    let strips = Strips { readable, is_synced, ..strips(4, 2) };
                    let plan = strips.plan(modified).unwrap();
                    assert!(plan.read & !readable == 0 || plan.method == Method::Rows);
                    match plan.method {
                        Method::Rows => assert!(readable.count_ones() < 4, "{readable:b} {modified:b}"),
                        Method::Reconstruct if plan.is_checked => assert!(plan.read.count_ones() > 4),
                        Method::Reconstruct => assert_eq!(plan.read | modified, 0b1111),
                        Method::Decode => assert_eq!((plan.read | plan.lost | modified) & 0b1111, 0b1111),
                        Method::Modify => assert!(is_synced),
                        Method::Full => assert_eq!(modified, 0b1111),
                        Method::Direct => unreachable!(),
                    }
                }
            }
        }
    }
}
