//! How parity of a rectangle is brought up to date: which strips are read, and what is made of them.
//!
//! A pure function of what is modified and of what can be read and written. Masks have bit `s` for strip `s` of the
//! stripe: data `0..k`, parity `k..k+m`.

/// The state of a stripe's strips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strips {
    /// Data strips.
    pub data: usize,
    /// Parity strips.
    pub parity: usize,
    /// Strips whose members take writes.
    pub live: u64,
    /// Live strips that can be read here.
    pub readable: u64,
    /// Whether parity fits the data.
    pub is_synced: bool,
}

/// How parity is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// No parity strip is live, or there is none: data is written, nothing else.
    Direct,
    /// Every data strip is new.
    Full,
    /// Read-modify-write: old data leaves parity, new data enters it.
    Modify,
    /// Reconstruct-write: parity is computed from all data.
    Reconstruct,
    /// As `Reconstruct`, after data strips that cannot be read were computed from the others.
    Decode,
}

/// What a rectangle's write does first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How parity is computed.
    pub method: Method,
    /// Strips to be read. For [`Method::Decode`] the decoder chooses among them.
    pub read: u64,
    /// Data strips to be computed from others ([`Method::Decode`] only).
    pub lost: u64,
    /// Parity strips that are written.
    pub parity: u64,
}

/// More strips are missing than parity stands for.
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

    /// How to write the data strips in `modified`.
    ///
    /// # Errors
    /// When new data would have no place, or old data that is needed cannot be had.
    pub fn plan(&self, modified: u64) -> Result<Plan, BeyondRedundancy> {
        let parity = self.live & !self.data_mask();
        let others = self.data_mask() & !modified;
        let plan = |method, read, lost| Ok(Plan { method, read, lost, parity });
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
        let modify_reads = (modified | parity).count_ones();
        if can_modify && (!can_reconstruct || modify_reads < others.count_ones()) {
            return plan(Method::Modify, modified | parity, 0);
        }
        if can_reconstruct {
            return plan(Method::Reconstruct, others, 0);
        }
        if (self.readable.count_ones() as usize) < self.data {
            return Err(BeyondRedundancy);
        }
        plan(Method::Decode, self.readable, others & !self.readable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strips(data: usize, parity: usize) -> Strips {
        let all = u64::MAX >> (64 - data - parity);
        Strips { data, parity, live: all, readable: all, is_synced: true }
    }

    #[test]
    fn whichever_reads_less_is_chosen() {
        let method = |data, parity, modified| strips(data, parity).plan(modified).unwrap().method;
        assert_eq!(method(8, 1, 0b1), Method::Modify);
        assert_eq!(method(8, 2, 0b11), Method::Modify);
        assert_eq!(method(4, 2, 0b1), Method::Reconstruct);
        assert_eq!(method(8, 1, 0b1111_1110), Method::Reconstruct);
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
        assert_eq!(lose(raid6, 0b1).plan(0b1).unwrap().method, Method::Reconstruct);
        let both = lose(raid6, 0b11).plan(0b1).unwrap();
        assert_eq!((both.method, both.read, both.lost), (Method::Decode, 0b11_1100, 0b10));
        assert_eq!(lose(raid6, 0b11_0000).plan(0b1).unwrap().method, Method::Direct);
        assert_eq!(lose(raid6, 0b111).plan(0b1), Err(BeyondRedundancy));
        assert_eq!(lose(strips(4, 1), 0b1_0000).plan(0b10).unwrap().method, Method::Direct);
    }

    #[test]
    fn old_parity_is_not_used_before_it_fits() {
        let raid5 = Strips { is_synced: false, ..strips(8, 1) };
        assert_eq!(raid5.plan(0b1).unwrap().method, Method::Reconstruct);
    }

    #[test]
    fn every_plan_reads_only_what_is_readable() {
        for readable in 0..1u64 << 6 {
            for modified in 1..1u64 << 4 {
                for is_synced in [false, true] {
                    let strips = Strips { readable, is_synced, ..strips(4, 2) };
                    let Ok(plan) = strips.plan(modified) else {
                        assert!(readable.count_ones() < 4, "{readable:b} {modified:b}");
                        continue;
                    };
                    assert_eq!(plan.read & !readable, 0);
                    match plan.method {
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
