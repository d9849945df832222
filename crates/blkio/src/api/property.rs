//! The types of properties.

use crate::{Error, Result, Value};

/// A type that a property can have: `bool`, `i32`, `u64` or, for any property, `String`.
pub trait Property: Sized + sealed::Sealed {
    /// The value as this type.
    ///
    /// # Errors
    /// `ENOTTY` when the property `name` has another type.
    fn from_value(name: &str, value: Value) -> Result<Self>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! property_types {
    ($($type:ty, $variant:ident;)*) => { $(
        impl sealed::Sealed for $type {}
        impl Property for $type {
            fn from_value(name: &str, value: Value) -> Result<$type> {
                match value {
                    Value::$variant(value) => Ok(value),
                    other => {
                        let message = format!("property {name} is {:?}, not {}", other.kind(), stringify!($type));
                        Err(Error::new(libc::ENOTTY, message))
                    }
                }
            }
        }
    )* };
}

property_types! {
    bool, Bool;
    i32, Int;
    u64, Uint64;
}

impl sealed::Sealed for String {}

impl Property for String {
    fn from_value(_: &str, value: Value) -> Result<String> {
        Ok(value.to_string())
    }
}
